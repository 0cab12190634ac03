//! A receiver of xl's, and what it writes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::num::NonZeroU8;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use data_threads::Joined;
use managers::xen::{Receiving, Xl};
use xen::handshake::{Answer, AnswerReader, PERMISSION};

/// What may wait to be read: it writes four answers.
const HEARD_MAX: usize = 8;
/// A receiver that has failed destroys its copy of the domain before it exits, for which it has as
/// long as `xl destroy`: one that is killed meanwhile leaves memory that nothing frees.
const CLOSED_MAX: Duration = Duration::from_secs(120);

/// What a receiver writes.
#[derive(Debug)]
pub(crate) enum Heard {
    /// An answer.
    Answer(Answer),
    /// It has closed its output, or writes something else.
    Ended(String),
}

/// What became of a permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permitted {
    /// The copy runs.
    Runs,
    /// It does not, and is destroyed.
    Failed(NonZeroU8),
    /// The receiver has not reported.
    Unknown,
}

/// A receiver. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Receiver {
    _thread: Joined,
    receiving: Receiving,
    pub(crate) heard: crossbeam_channel::Receiver<Heard>,
    is_permitted: bool,
    is_closed: bool,
}

impl Receiver {
    /// Starts it.
    pub(crate) fn start(xl: &Xl) -> Result<Self, String> {
        let receiving = xl.receive().map_err(|error| error.to_string())?;
        let (tell, heard) = bounded(HEARD_MAX);
        let output = receiving.output().try_clone().map_err(|error| error.to_string())?;
        let thread = data_threads::spawn("xl-answers", move || listen(output, &tell));
        let thread = thread.map_err(|error| error.to_string())?;
        let thread = thread.into();
        Ok(Self { _thread: thread, receiving, heard, is_permitted: false, is_closed: false })
    }

    /// A handle of what it reads.
    pub(crate) fn input(&self) -> std::io::Result<UnixStream> {
        self.receiving.input().try_clone()
    }

    /// Waits until it is ready for the stream.
    pub(crate) fn wait_banner(&self, limit: Duration) -> Result<(), String> {
        match self.heard.recv_timeout(limit) {
            Ok(Heard::Answer(Answer::Banner)) => Ok(()),
            Ok(Heard::Answer(other)) => Err(format!("xl wrote {other:?} before its banner")),
            Ok(Heard::Ended(why)) => Err(why),
            Err(_) => Err(format!("xl was not ready within {} s", limit.as_secs())),
        }
    }

    /// Permits it to run its copy, and waits for its report. Repeated, it only reads a late one.
    pub(crate) fn permit(&mut self, limit: Duration) -> Permitted {
        let is_repeated = std::mem::replace(&mut self.is_permitted, true);
        let limit = if is_repeated { Duration::ZERO } else { limit };
        if !is_repeated {
            // It may have exited, or may read nothing: then it does not report either.
            let _ = self.receiving.input().write_all(PERMISSION);
        }
        match self.heard.recv_timeout(limit) {
            Ok(Heard::Answer(Answer::Report { status })) => {
                NonZeroU8::new(status).map_or(Permitted::Runs, Permitted::Failed)
            }
            Ok(Heard::Answer(_) | Heard::Ended(_)) | Err(_) => Permitted::Unknown,
        }
    }

    /// Closes its input, and reads on until it has exited: one whose output is closed too exits
    /// before it has destroyed its copy.
    pub(crate) fn close(&mut self) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        self.receiving.close_input();
        let until = Instant::now() + CLOSED_MAX;
        while let Ok(heard) = self.heard.recv_deadline(until) {
            if matches!(heard, Heard::Ended(_)) {
                break;
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if !self.receiving.wait(left) {
            tracing::error!("xl's receiver does not exit, and is killed");
        }
    }

    /// Ends it at once. Returns whether it has exited: otherwise it waits in the kernel, and its
    /// copy may still change.
    pub(crate) fn end(&mut self) -> bool {
        let has_exited = self.receiving.kill();
        if !has_exited {
            tracing::error!(pid = self.receiving.pid(), "xl's receiver hangs, and can't be killed");
        }
        has_exited
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.receiving.pid()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // If it hangs, dropping it logs that.
        let _ = self.receiving.kill();
        // A process that it has started may still have it open.
        let _ = self.receiving.output().shutdown(Shutdown::Both);
    }
}

/// Reads its output to the end.
fn listen(mut output: UnixStream, tell: &Sender<Heard>) {
    let (mut reader, mut buffer) = (AnswerReader::default(), [0; 256]);
    let why = 'reading: loop {
        let count = match output.read(&mut buffer) {
            Ok(0) => break "xl's receiver has exited; its messages are in the agent's log".into(),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => break format!("xl's receiver can't be read: {error}"),
        };
        let mut bytes = &buffer[..count];
        loop {
            match reader.next(&mut bytes) {
                Ok(Some(answer)) => {
                    if tell.send(Heard::Answer(answer)).is_err() {
                        return;
                    }
                }
                Ok(None) => break,
                Err(error) => break 'reading error.to_string(),
            }
        }
    };
    // The receiver of this may be dropped.
    let _ = tell.send(Heard::Ended(why));
}
