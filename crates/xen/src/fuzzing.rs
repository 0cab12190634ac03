//! Entry points for the fuzzer and for this crate's tests. Everything asserted here is a guarantee
//! that callers rely on.

use std::ops::ControlFlow;

use page::{Epoch, PAGE_BYTES};

use crate::{PageWord, Sink, Splitter, Step, StreamError};

/// A page that was taken out of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenPage {
    /// Its number and type.
    pub word: PageWord,
    /// Its epoch.
    pub epoch: Epoch,
    /// Its bytes; empty if its type has none.
    pub body: Vec<u8>,
}

/// The parts of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The non-RAM stream.
    pub non_ram: Vec<u8>,
    /// The position of each epoch in it, from epoch 1.
    pub positions: Vec<u64>,
    /// The pages in order.
    pub pages: Vec<TakenPage>,
    /// What follows the stream.
    pub rest: Vec<u8>,
}

struct Collect<'a> {
    input: &'a [u8],
    parts: &'a mut Parts,
    /// Pages to take before the next is refused.
    room: usize,
}

impl Sink for Collect<'_> {
    fn non_ram(&mut self, bytes: &[u8]) {
        self.parts.non_ram.extend_from_slice(bytes);
    }

    fn epoch(&mut self, epoch: Epoch, position: u64) {
        self.parts.positions.push(position);
        assert_eq!(epoch.0 as usize, self.parts.positions.len());
        assert_eq!(position, self.parts.non_ram.len() as u64);
    }

    fn page(&mut self, word: PageWord, at: Option<usize>) -> ControlFlow<()> {
        assert_eq!(at.is_some(), word.kind.has_body());
        if self.room == 0 {
            return ControlFlow::Break(());
        }
        self.room -= 1;
        let epoch = Epoch(u32::try_from(self.parts.positions.len()).expect("epochs are counted"));
        assert!(epoch.0 > 0, "an epoch starts before its first page");
        if let Some(last) = self.parts.pages.last().filter(|last| last.epoch == epoch) {
            assert!(last.word.page < word.page, "page numbers ascend within an epoch");
        }
        let body = at.map_or(&[][..], |at| &self.input[at..at + PAGE_BYTES]).to_vec();
        self.parts.pages.push(TakenPage { word, epoch, body });
        ControlFlow::Continue(())
    }
}

/// Splits a stream that arrives in pieces of `piece_bytes`, with a sink that refuses a page after
/// every `pause_after` pages.
///
/// # Errors
/// The splitter's error, also for the stream's end, and the parts before it.
pub fn split(
    data: &[u8],
    piece_bytes: usize,
    pause_after: usize,
) -> Result<Parts, Box<(Parts, StreamError)>> {
    let mut splitter = Splitter::default();
    let mut parts = Parts::default();
    let (mut from, mut to) = (0, 0);
    loop {
        let input = &data[from..to];
        let mut sink = Collect { input, parts: &mut parts, room: pause_after.max(1) };
        let progress = match splitter.push(input, &mut sink) {
            Ok(progress) => progress,
            Err(error) => return Err(Box::new((parts, error))),
        };
        assert!(progress.consumed <= input.len());
        from += progress.consumed;
        match progress.step {
            Step::More { need } => {
                assert!(need > to - from, "it requests more than there is");
                assert!(need <= PAGE_BYTES);
                if to == data.len() {
                    let error = splitter.finish().expect_err("the stream is not complete");
                    return Err(Box::new((parts, error)));
                }
                to = to.saturating_add(piece_bytes.max(1)).min(data.len());
            }
            Step::Paused => {}
            Step::Ended => {
                assert_eq!(splitter.finish(), Ok(()));
                parts.rest = data[from..].to_vec();
                return Ok(parts);
            }
        }
    }
}
