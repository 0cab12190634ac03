//! Writes PAGE_DATA records for a receiver, from pages that arrive in any order.
//!
//! Of two versions of a page the receiver keeps the one that it reads last, with its type. So pages
//! may be written as they arrive, in records of any size, if an older version is dropped when a
//! newer one was written before. All pages that the source sent before other bytes of the stream
//! are written before these: VERIFY compares them, and what follows the image's END uses them.

use page::{Batch, BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};

use crate::{PageKind, PageWord, RECORD_PAGES_MAX, write};

/// The body of a page that arrived as part of a fill run.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// An error in what the source's agent sent. The domain is still the source's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// An epoch that does not follow the one before it.
    #[error("epoch {} follows epoch {}", .epoch.0, .before.0)]
    EpochOrder {
        /// The epoch.
        epoch: Epoch,
        /// The one before it.
        before: Epoch,
    },
    /// An epoch at another position than this one of the non-RAM stream.
    #[error(
        "epoch {} starts after {position} bytes of the non-RAM stream, and {written} were written",
        .epoch.0
    )]
    Position {
        /// The epoch.
        epoch: Epoch,
        /// Its position at the source.
        position: u64,
        /// Bytes that were written here.
        written: u64,
    },
    /// A page beyond the limit for this domain.
    #[error("page {:#x} is outside the domain, which has {pages_max} pages", .page.0)]
    OutsideDomain {
        /// The page.
        page: PageIndex,
        /// The limit.
        pages_max: u32,
    },
    /// A batch whose block is no [`PageKind`].
    #[error("a batch has the block {}, which is no type of pages", .block.0)]
    Block {
        /// The block.
        block: BlockId,
    },
    /// Pages that repeat another byte than 0, which no source sends.
    #[error("pages from {:#x} on repeat the byte {byte:#04x}", .first.0)]
    Fill {
        /// The first page.
        first: PageIndex,
        /// The byte.
        byte: u8,
    },
    /// A page that arrived after bytes that follow it in the stream were written.
    #[error("page {:#x} of epoch {} was missing when its epoch ended", .page.0, .epoch.0)]
    Missed {
        /// The page.
        page: PageIndex,
        /// Its epoch.
        epoch: Epoch,
    },
}

/// What to do with pages that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// Write the [`Record`], or it was written.
    Record,
    /// Nothing: newer versions of all these pages are written, or these are.
    Stale,
    /// Wait: bytes of the non-RAM stream that precede the pages may be missing.
    Early,
}

/// A PAGE_DATA record to write. It is reused, since it has buffers.
#[derive(Debug, Default)]
pub struct Record {
    pages: Vec<PageWord>,
    head: Vec<u8>,
    bodies: Vec<usize>,
}

impl Record {
    /// The record's bytes before the bodies.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// The pages whose bodies follow, in order, as indices into the pages that arrived.
    #[must_use]
    pub fn bodies(&self) -> &[usize] {
        &self.bodies
    }
}

/// Pages that arrived together on a lane.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// Their block, which is their type.
    pub block: BlockId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The pages with bodies.
    pub pages: &'a [PageIndex],
    /// Their bodies, one after the other.
    pub bytes: &'a [u8],
    /// The others.
    pub fills: &'a [Fill],
}

/// What all pages of a batch have in common, and those without bodies.
struct Of<'a> {
    block: BlockId,
    epoch: Epoch,
    fills: &'a [Fill],
}

/// The order of a stream that is written anew.
#[derive(Debug)]
pub struct Joiner {
    /// The epoch of the version of each page that was written last; 0 if there is none.
    newest: Vec<u32>,
    /// Page numbers are below.
    pages_max: u32,
    /// The last epoch that has started.
    epoch: Epoch,
    /// The last epoch before the last bytes of the non-RAM stream.
    ended: Epoch,
    /// Bytes of the non-RAM stream that were written.
    written: u64,
    /// Pages of a batch; kept for its buffer.
    pages: Vec<PageWord>,
}

impl Joiner {
    /// A joiner at the start of a stream, for pages below `pages_max`: for each it has four bytes.
    #[must_use]
    pub fn new(pages_max: u32) -> Self {
        let start = Epoch::default();
        Self {
            newest: Vec::new(),
            pages_max,
            epoch: start,
            ended: start,
            written: 0,
            pages: Vec::new(),
        }
    }

    /// Notes that bytes of the non-RAM stream were written. All pages before them must have been
    /// written.
    pub fn non_ram(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.written += bytes.len() as u64;
            self.ended = self.epoch;
        }
    }

    /// Whether the version of this epoch was written last.
    #[must_use]
    pub fn is_newest(&self, page: PageIndex, epoch: Epoch) -> bool {
        self.newest.get(page.0 as usize) == Some(&epoch.0)
    }

    /// Whether pages of this epoch may be written.
    #[must_use]
    pub fn has_started(&self, epoch: Epoch) -> bool {
        epoch <= self.epoch
    }

    /// Bytes of the non-RAM stream that were written.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Starts an epoch, as the source's splitter did.
    ///
    /// # Errors
    /// [`JoinError`] if something is missing before it.
    pub fn epoch(&mut self, epoch: Epoch, position: u64) -> Result<(), JoinError> {
        let (before, written) = (self.epoch, self.written);
        if before.0.checked_add(1) != Some(epoch.0) {
            return Err(JoinError::EpochOrder { epoch, before });
        }
        if position != written {
            return Err(JoinError::Position { epoch, position, written });
        }
        self.epoch = epoch;
        Ok(())
    }

    /// Takes pages of one epoch that arrived together, and makes a record of those that are needed.
    /// Records must reach the receiver in the order of these calls.
    ///
    /// # Errors
    /// [`JoinError`]: nothing more may be written.
    ///
    /// # Panics
    /// If there are more pages than [`RECORD_PAGES_MAX`](crate::RECORD_PAGES_MAX).
    pub fn page_data(
        &mut self,
        epoch: Epoch,
        pages: &[PageWord],
        record: &mut Record,
    ) -> Result<Joined, JoinError> {
        if !self.has_started(epoch) {
            return Ok(Joined::Early);
        }
        record.pages.clear();
        record.head.clear();
        record.bodies.clear();
        for (nth, word) in pages.iter().enumerate() {
            let newest = self.newest(word.page)?;
            if *newest >= epoch.0 {
                continue;
            }
            *newest = epoch.0;
            if epoch <= self.ended {
                return Err(JoinError::Missed { page: word.page, epoch });
            }
            record.pages.push(*word);
            if word.kind.has_body() {
                record.bodies.push(nth);
            }
        }
        if record.pages.is_empty() {
            return Ok(Joined::Stale);
        }
        write::page_data_head(&mut record.head, &record.pages);
        Ok(Joined::Record)
    }

    /// Writes those pages of a batch that are needed, as records, by `write`: one call for each
    /// body, and for what is between them.
    ///
    /// # Errors
    /// [`JoinError`]: nothing more may be written.
    pub fn batch(
        &mut self,
        batch: &Batch,
        record: &mut Record,
        write: impl FnMut(&[u8]),
    ) -> Result<Joined, JoinError> {
        let bodies = batch.bodies();
        let pages = bodies.iter().map(|body| body.page);
        let body = |nth: usize| bodies.get(nth).map(|body| batch.bytes_of(*body));
        let of = Of { block: batch.block, epoch: batch.epoch, fills: batch.fills() };
        self.pages(&of, pages, body, record, write)
    }

    /// As [`Joiner::batch`], for pages that arrived on a lane.
    ///
    /// # Errors
    /// As [`Joiner::batch`].
    pub fn arrived(
        &mut self,
        arrived: &Arrived<'_>,
        record: &mut Record,
        write: impl FnMut(&[u8]),
    ) -> Result<Joined, JoinError> {
        let Arrived { block, epoch, pages, bytes, fills } = *arrived;
        let body = |nth: usize| bytes.chunks_exact(PAGE_BYTES).nth(nth);
        let of = Of { block, epoch, fills };
        self.pages(&of, pages.iter().copied(), body, record, write)
    }

    /// `body` has the bytes of each of `pages`; for what follows these it has none.
    fn pages<'b>(
        &mut self,
        of: &Of<'_>,
        pages: impl Iterator<Item = PageIndex>,
        body: impl Fn(usize) -> Option<&'b [u8]>,
        record: &mut Record,
        mut write: impl FnMut(&[u8]),
    ) -> Result<Joined, JoinError> {
        let Of { block, epoch, fills } = *of;
        let kind = PageKind::of_block(block).ok_or(JoinError::Block { block })?;
        self.check_fills(fills)?;
        let filled = fills.iter().flat_map(|fill| {
            (fill.first.0..fill.first.0.saturating_add(fill.count)).map(PageIndex)
        });
        let mut words = pages.chain(filled).map(|page| PageWord { page, kind });
        let mut pages = std::mem::take(&mut self.pages);
        let (mut first, mut joined) = (0, Joined::Stale);
        loop {
            pages.clear();
            pages.extend(words.by_ref().take(RECORD_PAGES_MAX));
            if pages.is_empty() {
                break;
            }
            match self.page_data(epoch, &pages, record)? {
                Joined::Early => {
                    joined = Joined::Early;
                    break;
                }
                Joined::Stale => {}
                Joined::Record => {
                    joined = Joined::Record;
                    write(record.head());
                    for nth in record.bodies() {
                        write(body(first + nth).unwrap_or(&ZEROS));
                    }
                }
            }
            first += pages.len();
        }
        self.pages = pages;
        Ok(joined)
    }

    /// Fill runs are zero, and inside the domain.
    fn check_fills(&self, fills: &[Fill]) -> Result<(), JoinError> {
        let pages_max = self.pages_max;
        for fill in fills {
            let (page, byte) = (fill.first, fill.byte);
            if byte != 0 {
                return Err(JoinError::Fill { first: page, byte });
            }
            if page.0.checked_add(fill.count).is_none_or(|end| end > pages_max) {
                return Err(JoinError::OutsideDomain { page, pages_max });
            }
        }
        Ok(())
    }

    fn newest(&mut self, page: PageIndex) -> Result<&mut u32, JoinError> {
        let pages_max = self.pages_max;
        if page.0 >= pages_max {
            return Err(JoinError::OutsideDomain { page, pages_max });
        }
        let nth = page.0 as usize;
        if nth >= self.newest.len() {
            self.newest.resize(nth + 1, 0);
        }
        Ok(&mut self.newest[nth])
    }
}

#[cfg(test)]
mod tests;
