//! Why a page could not be placed, and who is to blame.

use std::io;
use std::sync::Arc;

use page::{BATCH_PAGES, BlockId, Epoch, PageIndex};
use ram::RamError;

/// Why pages could not be placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The source named a block that is not in its list.
    #[error("the source sent pages of RAM block {}, but announced {blocks} blocks", block.0)]
    UnknownBlock {
        /// The block's number.
        block: BlockId,
        /// How many there are.
        blocks: usize,
    },
    /// The source sent pages beyond the end of a block.
    #[error(
        "the source sent {count} pages from {first} on of RAM block {name}, which has {pages} pages"
    )]
    Outside {
        /// The block's name.
        name: String,
        /// The first page.
        first: PageIndex,
        /// How many.
        count: u32,
        /// How many the block has.
        pages: u64,
    },
    /// The source sent a page twice in one batch, so it is undefined which version wins.
    #[error("the source sent a page of RAM block {name} twice in one batch")]
    Twice {
        /// The block's name.
        name: String,
    },
    /// The source sent more bodies than a batch holds.
    #[error("the source sent {pages} pages in one batch; {BATCH_PAGES} are the most")]
    TooManyPages {
        /// How many came.
        pages: usize,
    },
    /// The number of bytes does not match the announced pages.
    #[error("the source sent {bytes} bytes for {pages} pages")]
    WrongLength {
        /// How many bytes came.
        bytes: usize,
        /// How many pages were announced.
        pages: usize,
    },
    /// The source sent a page as a delta to a version that is not the one here.
    #[error(
        "the source sent page {} of RAM block {name} as a delta to its version {}, and here is \
         version {}", page.0, base.0, here.0
    )]
    OtherBase {
        /// The block's name.
        name: String,
        /// Which page.
        page: PageIndex,
        /// The version that the delta is based on.
        base: Epoch,
        /// The version that is here.
        here: Epoch,
    },
    /// The source sent a delta to a block that can't be read here.
    #[error("the source sent deltas to RAM block {name}, which goes by QEMU's own stream")]
    NoBase {
        /// The block's name.
        name: String,
    },
    /// The source announced an impossible block.
    #[error(
        "the source announced RAM block {name:?} with {bytes} bytes: a name has 1 to 255 bytes, \
         a block whole pages, below 16 TiB"
    )]
    BadBlock {
        /// The block's name.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// The source announced more blocks than a VM can have.
    #[error("the source announced {blocks} RAM blocks; {max} are the most")]
    TooManyBlocks {
        /// How many.
        blocks: usize,
        /// How many there may be.
        max: usize,
    },
    /// The source announced a block twice.
    #[error("the source announced RAM block {name:?} twice")]
    BlockTwice {
        /// The block's name.
        name: String,
    },
    /// A block's size here differs from the source's.
    #[error("RAM block {name} has {bytes} bytes at the source and {here_bytes} here")]
    OtherSize {
        /// The block's name.
        name: String,
        /// Its size at the source.
        bytes: u64,
        /// The size of the RAM here.
        here_bytes: u64,
    },
    /// The source announced more inline RAM than this host could ever hold.
    #[error("the source announced RAM of {bytes} bytes; this host takes at most {max_bytes}")]
    TooMuchRam {
        /// The sum of all blocks that are placed inline.
        bytes: u64,
        /// Four times the host's memory.
        max_bytes: u64,
    },
    /// No memory for the audit's table. This host is to blame.
    #[error(
        "this host has no memory left for the audit's table, 8 bytes for each page of the VM: \
         free some, or move the VM with --audit off"
    )]
    NoMemory,
    /// No memory for a block's table. This host is to blame.
    #[error(
        "this host has no memory left for the table of RAM block {name}, 4 bytes for each of its \
         pages: free some"
    )]
    NoTable {
        /// The block's name.
        name: String,
    },
    /// The RAM can't be reached. This host is to blame.
    #[error("RAM block {name}: {source}")]
    Ram {
        /// The block's name.
        name: String,
        /// What went wrong.
        source: RamError,
    },
    /// The destination's QEMU takes no more of its stream.
    #[error(transparent)]
    Feeder(FeederError),
    /// RAM is complete: nothing more is placed.
    #[error("a batch arrived after the RAM was complete")]
    Closed,
}

impl PlaceError {
    /// Whether only the lane that delivered the pages is lost, and not the migration: the source
    /// sends them again over another lane.
    #[must_use]
    pub fn only_this_lane(&self) -> bool {
        // After a wrong base, the source sends the whole page.
        matches!(self, Self::Closed | Self::OtherBase { .. })
    }
}

impl From<FeederError> for PlaceError {
    fn from(error: FeederError) -> Self {
        match error {
            // A repetition of pages that were placed long ago.
            FeederError::Ended => Self::Closed,
            error => Self::Feeder(error),
        }
    }
}

/// Why nothing more can be fed to the destination's QEMU. The first reason is kept, and every
/// later call returns it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeederError {
    /// QEMU closed its end: it refused the stream, or died.
    #[error("the destination's QEMU stopped reading its stream: {0}")]
    Write(#[source] Arc<io::Error>),
    /// QEMU read nothing for too long, though there was something to read.
    #[error("the destination's QEMU hangs: it has read nothing of its stream for {seconds} s")]
    Unread {
        /// For how long.
        seconds: u64,
    },
    /// The thread that feeds it panicked.
    #[error("a fault in the agent: its thread feeder panicked; see the agent's log")]
    Fault,
    /// The feeder was stopped.
    #[error("feeding the destination's QEMU was stopped")]
    Stopped,
    /// The tail was fed already; nothing may follow it.
    #[error("the destination's QEMU has its whole stream already")]
    Ended,
    /// Pages before the head: QEMU could not tell what they belong to.
    #[error("pages arrived before the head of the stream")]
    NoHead,
    /// A second head: a stream starts once.
    #[error("the head of the stream arrived twice")]
    SecondHead,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers tell the source, and so the operator, nothing but the text.
    #[test]
    fn an_error_of_ram_says_why_and_what_to_do() {
        let said = PlaceError::Ram { name: "pc.ram".to_owned(), source: RamError::NoMemory };
        let said = said.to_string();
        assert!(said.starts_with("RAM block pc.ram: this host has no memory left"), "{said}");
        assert!(said.contains("raise the pool of huge pages"), "{said}");
    }
}
