//! A batch of pages: the unit of work, of hand-over and of locking.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::pool::Pool;
use crate::slot::{BATCH_PAGES, Body, Fill, SLOT_BYTES, Slot};
use crate::{BlockId, Epoch, PAGE_BYTES, PageIndex};

/// Pages of one block and one epoch, with the pooled buffer of their bytes.
#[derive(Debug)]
pub struct Batch {
    /// The block all pages of the batch belong to.
    pub block: BlockId,
    /// The epoch they were sent in.
    pub epoch: Epoch,
    slot: Slot,
    pool: Arc<Pool>,
}

impl Batch {
    pub(crate) fn new(slot: Slot, pool: Arc<Pool>) -> Self {
        Self { block: BlockId::default(), epoch: Epoch::default(), slot, pool }
    }

    /// The pages with bodies, in the order they were added.
    #[must_use]
    pub fn bodies(&self) -> &[Body] {
        &self.slot.bodies
    }

    /// The fill runs, in the order they were added.
    #[must_use]
    pub fn fills(&self) -> &[Fill] {
        &self.slot.fills
    }

    /// Whether the batch has no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slot.bodies.is_empty() && self.slot.fills.is_empty()
    }

    /// How many more bodies fit.
    #[must_use]
    pub fn room(&self) -> usize {
        BATCH_PAGES - self.slot.bodies.len()
    }

    /// Bytes of guest memory that the batch covers.
    #[must_use]
    pub fn guest_bytes(&self) -> u64 {
        let fills: u64 = self.slot.fills.iter().map(|fill| u64::from(fill.count)).sum();
        (self.slot.bodies.len() as u64 + fills) * PAGE_BYTES as u64
    }

    /// Adds a page whose bytes start at `at` in the buffer.
    ///
    /// # Panics
    /// If the batch is full or the bytes are not inside the buffer. Both come from the
    /// tap's own arithmetic, never from the stream.
    pub fn push_body(&mut self, page: PageIndex, at: usize) {
        self.parse_in_place().1.push_body(page, at);
    }

    /// Adds one page of `byte`, extending the last run if the page continues it.
    pub fn push_fill(&mut self, page: PageIndex, byte: u8) {
        self.parse_in_place().1.push_fill(page, byte);
    }

    /// Removes the bodies that `keep` rejects, given their number and bytes, and
    /// returns how many were removed.
    pub fn retain_bodies(&mut self, mut keep: impl FnMut(usize, &[u8]) -> bool) -> usize {
        let Slot { bytes, bodies, .. } = &mut self.slot;
        let (before, mut nth) = (bodies.len(), 0);
        bodies.retain(|body| {
            let at = body.at as usize;
            nth += 1;
            keep(nth - 1, &bytes[at..at + PAGE_BYTES])
        });
        before - bodies.len()
    }

    /// Removes the pages of fill runs that `keep` rejects. A run with pages removed from its
    /// middle is split.
    pub fn retain_fills(&mut self, keep: impl Fn(PageIndex) -> bool) {
        for Fill { first, count, byte } in std::mem::take(&mut self.slot.fills) {
            let pages = (first.0..).take(count as usize).map(PageIndex);
            pages.filter(|page| keep(*page)).for_each(|page| self.push_fill(page, byte));
        }
    }

    /// Removes all fill runs.
    pub fn clear_fills(&mut self) {
        self.slot.fills.clear();
    }

    /// The bytes of one body.
    #[must_use]
    pub fn bytes_of(&self, body: Body) -> &[u8] {
        let at = body.at as usize;
        &self.slot.bytes[at..at + PAGE_BYTES]
    }

    /// All bodies' bytes as one slice if they are contiguous, as in a multifd packet.
    /// In a classic stream they aren't.
    #[must_use]
    pub fn contiguous(&self) -> Option<&[u8]> {
        let first = self.slot.bodies.first()?.at as usize;
        let in_order = self
            .slot
            .bodies
            .iter()
            .enumerate()
            .all(|(nth, body)| body.at as usize == first + nth * PAGE_BYTES);
        in_order.then(|| &self.slot.bytes[first..first + self.slot.bodies.len() * PAGE_BYTES])
    }

    /// The buffer to read from and the tables to fill, borrowed together for a tap that
    /// parses in place.
    pub fn parse_in_place(&mut self) -> (&[u8], PagesMut<'_>) {
        let Slot { bytes, bodies, fills, .. } = &mut self.slot;
        let pages = PagesMut { block: &mut self.block, epoch: &mut self.epoch, bodies, fills };
        (bytes, pages)
    }

    /// The whole buffer, for reading into.
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        &mut self.slot.bytes
    }

    /// The whole buffer.
    #[must_use]
    pub fn buffer(&self) -> &[u8] {
        &self.slot.bytes
    }
}

/// A batch's tables, borrowed while its buffer is read.
#[derive(Debug)]
pub struct PagesMut<'b> {
    block: &'b mut BlockId,
    epoch: &'b mut Epoch,
    bodies: &'b mut Vec<Body>,
    fills: &'b mut Vec<Fill>,
}

impl PagesMut<'_> {
    /// Whether the batch carries nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bodies.is_empty() && self.fills.is_empty()
    }

    /// Continues if the batch can take a page of this block and epoch: all of its pages are of one.
    #[inline]
    pub fn takes(&mut self, block: BlockId, epoch: Epoch) -> ControlFlow<()> {
        if self.is_empty() {
            (*self.block, *self.epoch) = (block, epoch);
        }
        match (*self.block, *self.epoch) == (block, epoch) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }

    /// How many more bodies fit.
    #[must_use]
    pub fn room(&self) -> usize {
        BATCH_PAGES - self.bodies.len()
    }

    /// How many fill runs it has.
    #[must_use]
    pub fn fill_runs(&self) -> usize {
        self.fills.len()
    }

    /// As [`Batch::push_body`].
    ///
    /// # Panics
    /// As for [`Batch::push_body`].
    pub fn push_body(&mut self, page: PageIndex, at: usize) {
        assert!(self.room() > 0, "a batch holds {BATCH_PAGES} bodies");
        assert!(at + PAGE_BYTES <= SLOT_BYTES, "a body lies inside its buffer");
        let at = u32::try_from(at).expect("a buffer is below 4 GiB");
        self.bodies.push(Body { page, at });
    }

    /// As [`Batch::push_fill`].
    pub fn push_fill(&mut self, page: PageIndex, byte: u8) {
        if let Some(last) = self.fills.last_mut()
            && last.byte == byte
            && last.first.0.checked_add(last.count) == Some(page.0)
        {
            last.count += 1;
            return;
        }
        self.fills.push(Fill { first: page, count: 1, byte });
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.slot));
    }
}
