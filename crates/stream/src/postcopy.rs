//! Finds where a stream that is passed on unchanged turns to post-copy.

use std::ops::ControlFlow;

use page::{BlockId, Epoch, PageIndex};

use crate::record::{MAGIC, command, kind};
use crate::{Progress, Sink, Splitter, Step, StreamError, Unsplittable};

/// Whether a connection starts as one by which a source resumes a postcopy that was
/// interrupted: without a header, with a command about pages that have arrived.
#[must_use]
pub fn resumes_postcopy(bytes: &[u8]) -> bool {
    let [kind::COMMAND, high, low, ..] = bytes[..] else { return false };
    matches!(u16::from_be_bytes([high, low]), command::RECV_BITMAP | command::POSTCOPY_RESUME)
}

/// Looks for the first command of post-copy, in pieces of any size. A stream that resumes
/// post-copy starts with one.
///
/// From it on the VM runs at the destination while part of its memory is still at the
/// source, so it stops if the connection breaks.
#[derive(Debug)]
pub struct PostcopyWatch {
    /// None once the command was found, or can't follow any more.
    splitter: Option<Splitter>,
    /// An incomplete record at the end of the pieces so far.
    unread: Vec<u8>,
    is_stream: bool,
}

impl Default for PostcopyWatch {
    fn default() -> Self {
        Self { splitter: Some(Splitter::watching()), unread: Vec::new(), is_stream: false }
    }
}

impl PostcopyWatch {
    /// Parses the next bytes; returns whether post-copy starts in them.
    ///
    /// Bytes that can't be parsed, such as encrypted ones or those of some devices, end the
    /// search.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let Some(mut splitter) = self.splitter.take() else { return false };
        self.unread.extend_from_slice(bytes);
        self.is_stream |= self.unread.starts_with(&MAGIC.to_be_bytes());
        let mut at = 0;
        let begins = loop {
            let parsed = splitter.push(&self.unread[at..], &mut AnyPage);
            let Progress { consumed, step } = match parsed {
                Ok(progress) => progress,
                Err(StreamError::NotAStream { .. }) => break resumes_postcopy(&self.unread),
                Err(_) => break false,
            };
            at += consumed;
            match step {
                Step::More { .. } => {
                    self.unread.drain(..at);
                    self.splitter = Some(splitter);
                    return false;
                }
                Step::Head(head) if head.may_turn_to_postcopy => {}
                Step::Rest { reason, .. } | Step::Whole { reason, .. } => {
                    break matches!(reason, Unsplittable::Postcopy { .. });
                }
                Step::Head(_) | Step::Paused | Step::Tail(_) => break false,
            }
        };
        self.unread = Vec::new();
        begins
    }

    /// Whether it is a QEMU's stream from its beginning on, as far as it was read.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        self.is_stream
    }
}

/// Takes any page, and keeps none.
struct AnyPage;

impl Sink for AnyPage {
    fn body(&mut self, _: BlockId, _: PageIndex, _: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn fill(&mut self, _: BlockId, _: PageIndex, _: u8) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, _: Epoch) {}
}
