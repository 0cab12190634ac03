//! Pages into QEMU's RAM.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use page::{BATCH_PAGES, Epoch, Fill, PAGE_BYTES, PageIndex};
use ram::{Mapping, Piece, RamError, await_bytes};

use crate::block::Block;
use crate::placer::{Counts, Gate};
use crate::{PlaceError, Placed};

/// Pages of one epoch for a block that is mapped.
pub(crate) struct Mapped<'p> {
    pub(crate) block: &'p Block,
    pub(crate) mapping: &'p Mapping,
    pub(crate) gate: &'p Gate,
    pub(crate) epoch: Epoch,
}

impl Mapped<'_> {
    /// Bodies that are in memory.
    pub(crate) fn place_bodies(&self, pages: &[PageIndex], bytes: &[u8]) -> Placed {
        let span = self.block.span_of_pages(pages)?;
        let mut counts = Counts::default();
        let _guard = self.block.lock.lock(span);
        self.gate.check()?;
        let mut pieces = [Piece::Drop { bytes: 0 }; BATCH_PAGES];
        let whole_batches = pages.chunks(BATCH_PAGES).zip(bytes.chunks(BATCH_PAGES * PAGE_BYTES));
        for (pages, bytes) in whole_batches {
            let pieces = &mut pieces[..pages.len()];
            let stale = self.plan(pages, 0, pieces);
            self.mapping.write_pieces(bytes, pieces).map_err(|error| self.blame(error))?;
            counts.stale += stale;
            counts.placed += pages.len() as u64 - stale;
        }
        Ok(counts)
    }

    /// Bodies that are still in a socket: see the crate's third rule.
    pub(crate) fn receive_bodies(&self, pages: &[PageIndex], socket: BorrowedFd<'_>) -> Placed {
        let span = self.block.span_of_pages(pages)?;
        let total_bytes = pages.len() * PAGE_BYTES;
        let (mut received_bytes, mut stale) = (0, None);
        while received_bytes < total_bytes {
            if stale.is_some() {
                await_bytes(socket).map_err(|error| self.blame(error))?;
            }
            let _guard = self.block.lock.lock(span.clone());
            self.gate.check()?;
            let mut pieces = [Piece::Drop { bytes: 0 }; BATCH_PAGES];
            let left = &pages[received_bytes / PAGE_BYTES..];
            let pieces = &mut pieces[..left.len()];
            let stale_now = self.plan(left, received_bytes % PAGE_BYTES, pieces);
            // What becomes stale later was placed all the same, in part.
            stale.get_or_insert(stale_now);
            received_bytes +=
                self.mapping.receive_ready(socket, pieces).map_err(|error| self.blame(error))?;
        }
        let stale = stale.unwrap_or(0);
        Ok(Counts { placed: pages.len() as u64 - stale, stale, ..Counts::default() })
    }

    /// Where the bytes of `pages` go, the first `taken` being here already.
    /// Returns how many of the pages are out of date.
    fn plan(&self, pages: &[PageIndex], taken: usize, pieces: &mut [Piece]) -> u64 {
        let (mut taken, mut stale) = (taken, 0);
        for (piece, &page) in pieces.iter_mut().zip(pages) {
            let bytes = PAGE_BYTES - taken;
            *piece = if self.block.versions.claim(page, self.epoch) {
                self.block.versions.set_nonzero(page);
                Piece::Ram { offset: page.offset() + taken as u64, bytes }
            } else {
                stale += 1;
                Piece::Drop { bytes }
            };
            taken = 0;
        }
        stale
    }

    /// Runs of one byte.
    pub(crate) fn place_fills(&self, fills: &[Fill]) -> Placed {
        let span = self.block.span_of_fills(fills)?;
        let mut counts = Counts::default();
        let _guard = self.block.lock.lock(span);
        self.gate.check()?;
        for fill in fills {
            self.place_fill(fill, &mut counts)?;
        }
        Ok(counts)
    }

    /// Writes the parts of one run that are new and not zero already.
    fn place_fill(&self, fill: &Fill, counts: &mut Counts) -> Result<(), PlaceError> {
        let versions = &self.block.versions;
        let mut run = fill.first.0..fill.first.0;
        for page in (fill.first.0..).take(fill.count as usize).map(PageIndex) {
            let is_new = versions.claim(page, self.epoch);
            if is_new && (fill.byte != 0 || versions.may_be_nonzero(page)) {
                run.end = page.0 + 1;
                continue;
            }
            counts.stale += u64::from(!is_new);
            counts.fills_skipped += u64::from(is_new);
            counts.fills_written += self.write_run(run, fill.byte)?;
            run = page.0 + 1..page.0 + 1;
        }
        counts.fills_written += self.write_run(run, fill.byte)?;
        Ok(())
    }

    /// Writes `byte` to all of `run`, and returns how many pages that are.
    fn write_run(&self, run: Range<u32>, byte: u8) -> Result<u64, PlaceError> {
        let pages = run.end - run.start;
        if pages == 0 {
            return Ok(0);
        }
        let (offset, bytes) = (PageIndex(run.start).offset(), PageIndex(pages).offset());
        let written = if byte == 0 {
            self.mapping
                .fill(offset, bytes, 0)
                .inspect(|()| run.for_each(|page| self.block.versions.set_zero(PageIndex(page))))
        } else {
            run.for_each(|page| self.block.versions.set_nonzero(PageIndex(page)));
            self.mapping.fill(offset, bytes, byte)
        };
        written.map_err(|error| self.blame(error))?;
        Ok(u64::from(pages))
    }

    fn blame(&self, error: RamError) -> PlaceError {
        match error {
            RamError::Receive { source } => PlaceError::Lane(source),
            source => PlaceError::Ram { name: self.block.name.clone(), source },
        }
    }
}
