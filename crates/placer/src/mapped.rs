//! Pages into QEMU's RAM.

use std::ops::Range;

use page::{BATCH_PAGES, Epoch, Fill, PAGE_BYTES, PageIndex};
use ram::{Mapping, Piece, RamError};

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
            let stale = self.plan(pages, pieces);
            self.mapping.write_pieces(bytes, pieces).map_err(|error| self.blame(error))?;
            counts.stale += stale;
            counts.placed += pages.len() as u64 - stale;
        }
        Ok(counts)
    }

    /// Where the bytes of `pages` go. Returns how many of the pages are out of date.
    fn plan(&self, pages: &[PageIndex], pieces: &mut [Piece]) -> u64 {
        let mut stale = 0;
        for (piece, &page) in pieces.iter_mut().zip(pages) {
            *piece = if self.block.versions.claim(page, self.epoch) {
                self.block.versions.set_nonzero(page);
                Piece::Ram { offset: page.offset(), bytes: PAGE_BYTES }
            } else {
                stale += 1;
                Piece::Drop { bytes: PAGE_BYTES }
            };
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
        PlaceError::Ram { name: self.block.name.clone(), source: error }
    }
}
