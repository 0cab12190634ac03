//! The helper's side: writes an answer.

use crate::code::{cleaned, put_text};
use crate::frame::{self, CONTENT_BYTES_MAX, Kind};
use crate::run::{Last, RUN_BYTES_MAX};
use crate::{Clears, Device, Greeting, Query, Run, Summary, VERSION};

/// The most bytes of a refusal's text.
pub(crate) const TEXT_BYTES_MAX: usize = 512;
/// Runs are written once a frame has that many bytes: small enough to be sent early, large enough
/// to compress well.
const RUNS_BYTES: usize = 32 << 10;
const _: () = assert!(RUNS_BYTES + RUN_BYTES_MAX <= CONTENT_BYTES_MAX);

/// An answer to one query, appended piece by piece to the caller's bytes. A run that starts where
/// the last one ended is merged with it.
#[derive(Debug)]
pub struct Reply {
    nonce: u64,
    sequence: u32,
    runs: u64,
    pages: u64,
    open: Option<Run>,
    last: Last,
    content: Vec<u8>,
}

impl Reply {
    /// Starts an answer with the greeting. `program` is the helper's own version.
    #[must_use]
    pub fn new(query: &Query, program: &str, out: &mut Vec<u8>) -> Self {
        let nonce = query.nonce;
        let (program, clears) = (program.to_owned(), Clears::default());
        let greeting = Greeting { version: VERSION, nonce, program, clears };
        out.extend_from_slice(&greeting.to_bytes());
        Self {
            nonce,
            sequence: 0,
            runs: 0,
            pages: 0,
            open: None,
            last: Last::default(),
            content: Vec::new(),
        }
    }

    /// The number of runs so far.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// The number of their pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Adds a disk. The first one has the number 0.
    pub fn device(&mut self, device: &Device, out: &mut Vec<u8>) {
        let mut content = Vec::new();
        device.write(&mut content);
        self.frame(Kind::Device, &content, out);
    }

    /// Adds a run on a disk that was added before.
    pub fn run(&mut self, run: Run, out: &mut Vec<u8>) {
        self.pages += u64::from(run.pages);
        if let Some(open) = &mut self.open
            && open.is_followed_by(&run)
            && let Some(pages) = open.pages.checked_add(run.pages)
        {
            open.pages = pages;
            return;
        }
        self.close();
        self.runs += 1;
        self.open = Some(run);
        if self.content.len() >= RUNS_BYTES {
            self.flush(out);
        }
    }

    /// Ends the answer. The pages and runs of `summary` are replaced by those written.
    pub fn finish(mut self, mut summary: Summary, out: &mut Vec<u8>) {
        self.close();
        self.flush(out);
        (summary.pages, summary.runs) = (self.pages, self.runs);
        let mut content = Vec::new();
        summary.write(&mut content);
        self.frame(Kind::Summary, &content, out);
    }

    /// Ends the answer without a map.
    pub fn refuse(mut self, text: &str, out: &mut Vec<u8>) {
        let mut content = Vec::new();
        put_text(&cleaned(text, TEXT_BYTES_MAX), &mut content);
        self.frame(Kind::Refusal, &content, out);
    }

    /// Writes the runs added so far without waiting for more.
    pub fn hand_on(&mut self, out: &mut Vec<u8>) {
        self.close();
        self.flush(out);
    }

    fn close(&mut self) {
        if let Some(run) = self.open.take() {
            self.last.write(&run, &mut self.content);
        }
    }

    fn flush(&mut self, out: &mut Vec<u8>) {
        if self.content.is_empty() {
            return;
        }
        let content = std::mem::take(&mut self.content);
        self.frame(Kind::Runs, &content, out);
        self.last = Last::default();
    }

    fn frame(&mut self, kind: Kind, content: &[u8], out: &mut Vec<u8>) {
        frame::write(kind, self.sequence, self.nonce, content, out);
        self.sequence = self.sequence.wrapping_add(1);
    }
}
