//! Writes pages into QEMU's RAM.

use std::ops::Range;

use page::{BATCH_PAGES, Buffer, Deltas, Fill, PAGE_BYTES, PageIndex, is_zero};
use ram::{Mapping, Piece, RamError};

use crate::PlaceError;
use crate::place::{Fingerprints, PageTarget};

/// Pages that are read at a time where they may have to be zeroed.
const ZEROED_AT_ONCE: u32 = 16;

/// Pages of one epoch for a block that is mapped.
pub(crate) struct Mapped<'p> {
    pub(crate) place: PageTarget<'p>,
    pub(crate) mapping: &'p Mapping,
}

impl Mapped<'_> {
    /// Bodies that are in memory.
    pub(crate) fn place_bodies(&self, pages: &[PageIndex], bytes: &[u8]) -> Result<(), PlaceError> {
        let PageTarget { block, gate, .. } = self.place;
        let span = block.span_of_pages(pages)?;
        let fingerprints = self.place.fingerprints(bytes);
        let _guard = block.lock.lock(span);
        gate.check()?;
        let mut pieces = [Piece::Drop { bytes: 0 }; BATCH_PAGES];
        let pieces = &mut pieces[..pages.len()];
        self.plan(pages, pieces);
        self.mapping.write_pieces(bytes, pieces).map_err(|error| self.blame(error))?;
        self.note_bodies(pages, pieces, &fingerprints);
        Ok(())
    }

    /// Places pages that arrived as deltas. Bases are checked and read while their range is
    /// locked, so no other thread changes them meanwhile.
    pub(crate) fn place_deltas(
        &self,
        pages: &[PageIndex],
        deltas: Deltas<'_>,
        bodies: &mut Buffer,
    ) -> Result<(), PlaceError> {
        let PageTarget { block, gate, .. } = self.place;
        let span = block.span_of_pages(pages)?;
        if deltas.iter().len() != pages.len() {
            let (bytes, pages) = (deltas.iter().len() * PAGE_BYTES, pages.len());
            return Err(PlaceError::WrongLength { bytes, pages });
        }
        let bodies = bodies.room(pages.len() * PAGE_BYTES);
        let _guard = block.lock.lock(span);
        gate.check()?;
        let mut pieces = [Piece::Drop { bytes: 0 }; BATCH_PAGES];
        let pieces = &mut pieces[..pages.len()];
        self.plan_deltas(pages, deltas, pieces)?;
        let offsets = pages.iter().map(|page| page.offset());
        self.mapping.gather(offsets, bodies).map_err(|error| self.blame(error))?;
        for (delta, body) in deltas.iter().zip(bodies.chunks_exact_mut(PAGE_BYTES)) {
            delta.apply(body);
        }
        let fingerprints = self.place.fingerprints(bodies);
        self.mapping.write_pieces(bodies, pieces).map_err(|error| self.blame(error))?;
        self.note_bodies(pages, pieces, &fingerprints);
        Ok(())
    }

    /// As [`Mapped::plan`]. A delta that has already arrived by another lane has lost its base,
    /// and needs none.
    fn plan_deltas(
        &self,
        pages: &[PageIndex],
        deltas: Deltas<'_>,
        pieces: &mut [Piece],
    ) -> Result<(), PlaceError> {
        let PageTarget { block, epoch, .. } = self.place;
        for ((piece, &page), delta) in pieces.iter_mut().zip(pages).zip(deltas.iter()) {
            let here = block.versions.of(page);
            let is_new = match delta.base() {
                None => here <= epoch,
                Some(_) if here >= epoch => false,
                Some(base) if here == base => true,
                Some(base) => {
                    let name = block.name.clone();
                    return Err(PlaceError::OtherBase { name, page, base, here });
                }
            };
            *piece = if is_new {
                Piece::Ram { offset: page.offset(), bytes: PAGE_BYTES }
            } else {
                Piece::Drop { bytes: PAGE_BYTES }
            };
        }
        for (piece, &page) in pieces.iter().zip(pages) {
            if matches!(piece, Piece::Ram { .. }) {
                block.versions.claim(page, epoch);
                block.versions.set_nonzero(page);
            }
        }
        Ok(())
    }

    /// Notes which pages of a batch were written, while their range is locked.
    fn note_bodies(&self, pages: &[PageIndex], pieces: &[Piece], fingerprints: &Fingerprints) {
        let written = pages.iter().zip(pieces).zip(fingerprints);
        self.place.note(written.filter_map(|((page, piece), fingerprint)| {
            matches!(piece, Piece::Ram { .. }).then_some((*page, *fingerprint))
        }));
    }

    /// Decides where the bytes of `pages` go: nowhere if a page is out of date.
    fn plan(&self, pages: &[PageIndex], pieces: &mut [Piece]) {
        let versions = &self.place.block.versions;
        for (piece, &page) in pieces.iter_mut().zip(pages) {
            *piece = if versions.claim(page, self.place.epoch) {
                versions.set_nonzero(page);
                Piece::Ram { offset: page.offset(), bytes: PAGE_BYTES }
            } else {
                Piece::Drop { bytes: PAGE_BYTES }
            };
        }
    }

    /// Runs of one byte.
    pub(crate) fn place_fills(&self, fills: &[Fill]) -> Result<(), PlaceError> {
        let PageTarget { block, gate, .. } = self.place;
        let span = block.span_of_fills(fills)?;
        let _guard = block.lock.lock(span);
        gate.check()?;
        for fill in fills {
            self.place_fill(fill)?;
        }
        Ok(())
    }

    /// Writes the parts of one run that are new and not zero already.
    fn place_fill(&self, fill: &Fill) -> Result<(), PlaceError> {
        let versions = &self.place.block.versions;
        let (mut noting, fingerprint) =
            (self.place.noting(), self.place.fill_fingerprint(fill.byte));
        let mut run = fill.first.0..fill.first.0;
        for page in (fill.first.0..).take(fill.count as usize).map(PageIndex) {
            let is_new = versions.claim(page, self.place.epoch);
            if is_new && (fill.byte != 0 || versions.may_be_nonzero(page)) {
                run.end = page.0 + 1;
                continue;
            }
            if is_new {
                noting.note(page, fingerprint);
            }
            self.write_run(run, fill.byte)?;
            run = page.0 + 1..page.0 + 1;
        }
        self.write_run(run, fill.byte)
    }

    /// Writes `byte` to all of `run`.
    fn write_run(&self, run: Range<u32>, byte: u8) -> Result<(), PlaceError> {
        if run.is_empty() {
            return Ok(());
        }
        let versions = &self.place.block.versions;
        if byte == 0 {
            self.zero(run.clone())?;
            run.clone().for_each(|page| versions.set_zero(PageIndex(page)));
        } else {
            run.clone().for_each(|page| versions.set_nonzero(PageIndex(page)));
            self.write_bytes(run.clone(), byte)?;
        }
        self.note_fill(run, byte);
        Ok(())
    }

    /// Zeroes pages that may not be zero. They are read first: with RAM in a file
    /// of unknown content, writing zeros would fill all of the file's holes.
    fn zero(&self, run: Range<u32>) -> Result<(), PlaceError> {
        let mut read = [0; ZEROED_AT_ONCE as usize * PAGE_BYTES];
        for first in run.clone().step_by(ZEROED_AT_ONCE as usize) {
            let end = run.end.min(first.saturating_add(ZEROED_AT_ONCE));
            let bytes = &mut read[..(end - first) as usize * PAGE_BYTES];
            self.mapping.read(PageIndex(first).offset(), bytes).map_err(|e| self.blame(e))?;
            let mut nonzero = first..first;
            for (page, bytes) in (first..end).zip(bytes.chunks_exact(PAGE_BYTES)) {
                if is_zero(bytes) {
                    self.write_bytes(nonzero, 0)?;
                    nonzero = page + 1..page + 1;
                } else {
                    nonzero.end = page + 1;
                }
            }
            self.write_bytes(nonzero, 0)?;
        }
        Ok(())
    }

    /// Writes `byte` to all of `run`, whatever is there.
    fn write_bytes(&self, run: Range<u32>, byte: u8) -> Result<(), PlaceError> {
        if run.is_empty() {
            return Ok(());
        }
        let (offset, bytes) = (PageIndex(run.start).offset(), PageIndex(run.end).offset());
        self.mapping.fill(offset, bytes - offset, byte).map_err(|error| self.blame(error))
    }

    fn note_fill(&self, run: Range<u32>, byte: u8) {
        let fingerprint = self.place.fill_fingerprint(byte);
        self.place.note(run.map(|page| (PageIndex(page), fingerprint)));
    }

    fn blame(&self, error: RamError) -> PlaceError {
        PlaceError::Ram { name: self.place.block.name.clone(), source: error }
    }
}
