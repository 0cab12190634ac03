//! Pages as records of the stream that QEMU loads.
//!
//! A chunk is obtained before the range is locked, and queued before it is unlocked. So no thread
//! waits for QEMU while it holds a lock, and of two versions of a page, the newer one by epoch is
//! also the later one in the stream.

use page::{Fill, PAGE_BYTES, PageIndex};
use stream::PartSection;

use crate::PlaceError;
use crate::feeder::{FILLS_MAX, FeederHandle};
use crate::place::{Noting, PageTarget};

/// Names were checked when the placer was made.
const NAME_FITS: &str = "a block's name has at most 255 bytes";

/// Pages of one epoch for a block that is not mapped.
pub(crate) struct Inline<'p> {
    pub(crate) place: PageTarget<'p>,
    pub(crate) feeder: &'p FeederHandle,
}

impl Inline<'_> {
    /// Bodies that are in memory.
    pub(crate) fn place_bodies(&self, pages: &[PageIndex], bytes: &[u8]) -> Result<(), PlaceError> {
        let PageTarget { block, gate, epoch, .. } = self.place;
        let span = block.span_of_pages(pages)?;
        let fingerprints = self.place.fingerprints(bytes);
        let (mut chunk, ram) = self.feeder.chunk_for_pages()?;
        let _guard = block.lock.lock(span);
        gate.check()?;
        let mut section = PartSection::begin(&mut chunk.bytes, ram.id, ram.footers);
        let bodies = bytes.chunks_exact(PAGE_BYTES).filter_map(<[u8]>::first_chunk);
        let (mut is_empty, mut noting) = (true, self.place.noting());
        for ((&page, body), fingerprint) in pages.iter().zip(bodies).zip(fingerprints) {
            if !block.versions.claim(page, epoch) {
                continue;
            }
            block.versions.set_nonzero(page);
            section.body(&block.name, page, body).expect(NAME_FITS);
            noting.note(page, fingerprint);
            is_empty = false;
        }
        if !is_empty {
            section.finish();
            chunk.queue_section()?;
        }
        Ok(())
    }

    /// Runs of one byte, in as many chunks as they need, one after the other.
    pub(crate) fn place_fills(&self, fills: &[Fill]) -> Result<(), PlaceError> {
        let PageTarget { block, gate, .. } = self.place;
        let span = block.span_of_fills(fills)?;
        let mut pages = fills.iter().flat_map(|fill| {
            (fill.first.0..).take(fill.count as usize).map(|page| (PageIndex(page), fill.byte))
        });
        let mut next = pages.next();
        while next.is_some() {
            let (mut chunk, ram) = self.feeder.chunk_for_pages()?;
            let _guard = block.lock.lock(span.clone());
            gate.check()?;
            let mut section = PartSection::begin(&mut chunk.bytes, ram.id, ram.footers);
            let (mut records, mut noting) = (0, self.place.noting());
            while let Some((page, byte)) = next
                && records < FILLS_MAX
            {
                if self.claim_fill(page, byte, &mut noting) {
                    section.fill(&block.name, page, byte).expect(NAME_FITS);
                    records += 1;
                }
                next = pages.next();
            }
            if records > 0 {
                section.finish();
                chunk.queue_section()?;
            }
        }
        Ok(())
    }

    /// Whether a page of `byte` has to be fed to QEMU.
    fn claim_fill(&self, page: PageIndex, byte: u8, noting: &mut Noting<'_>) -> bool {
        let versions = &self.place.block.versions;
        if !versions.claim(page, self.place.epoch) {
            return false;
        }
        noting.note(page, self.place.fill_fingerprint(byte));
        if byte != 0 {
            versions.set_nonzero(page);
        } else if versions.may_be_nonzero(page) {
            versions.set_zero(page);
        } else {
            return false;
        }
        true
    }
}
