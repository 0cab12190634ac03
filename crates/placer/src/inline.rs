//! Pages as records of the stream that QEMU loads.
//!
//! A chunk is obtained before the range is locked, and queued before it is
//! unlocked: so nobody waits for QEMU with a lock, and of two versions of a
//! page the one that the epochs call newer is also the later in the stream.

use page::{Epoch, Fill, PAGE_BYTES, PageIndex};

use crate::PlaceError;
use crate::block::Block;
use crate::feeder::{CHUNK_BYTES, FeederHandle};
use crate::placer::{Counts, Gate};
use crate::records::Section;

/// Bodies that are in memory.
pub(crate) fn place_bodies(
    block: &Block,
    feeder: &FeederHandle,
    gate: &Gate,
    epoch: Epoch,
    pages: &[PageIndex],
    bytes: &[u8],
) -> Result<Counts, PlaceError> {
    let span = block.span_of_pages(pages)?;
    let mut counts = Counts::default();
    let (mut chunk, ram) = feeder.chunk_for_pages()?;
    let _guard = block.lock.lock(span);
    gate.check()?;
    let mut section = Section::begin(&mut chunk.bytes, ram, &block.name);
    for (&page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
        if !block.versions.claim(page, epoch) {
            counts.stale += 1;
            continue;
        }
        block.versions.set_nonzero(page);
        section.body(page, bytes);
        counts.placed += 1;
    }
    section.end();
    chunk.queue()?;
    Ok(counts)
}

/// Runs of one byte.
pub(crate) fn place_fills(
    block: &Block,
    feeder: &FeederHandle,
    gate: &Gate,
    epoch: Epoch,
    fills: &[Fill],
) -> Result<Counts, PlaceError> {
    let span = block.span_of_fills(fills)?;
    let mut counts = Counts::default();
    let mut pages = fills.iter().flat_map(|fill| {
        (fill.first.0..).take(fill.count as usize).map(|page| (PageIndex(page), fill.byte))
    });
    let mut next = pages.next();
    while next.is_some() {
        let (mut chunk, ram) = feeder.chunk_for_pages()?;
        let _guard = block.lock.lock(span.clone());
        gate.check()?;
        let mut section = Section::begin(&mut chunk.bytes, ram, &block.name);
        while let Some((page, byte)) = next
            && section.has_room(CHUNK_BYTES)
        {
            if !block.versions.claim(page, epoch) {
                counts.stale += 1;
            } else if byte == 0 && !block.versions.may_be_nonzero(page) {
                counts.fills_skipped += 1;
            } else {
                section.fill(page, byte);
                counts.fills_written += 1;
                if byte == 0 {
                    block.versions.set_zero(page);
                } else {
                    block.versions.set_nonzero(page);
                }
            }
            next = pages.next();
        }
        section.end();
        chunk.queue()?;
    }
    Ok(counts)
}
