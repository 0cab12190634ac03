//! Pages into RAM that this process shares with QEMU.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use page::{BATCH_PAGES, Epoch, Fill, PAGE_BYTES, PageIndex};
use ram::{Mapping, Piece, RamError, await_bytes};

use crate::PlaceError;
use crate::block::Block;
use crate::placer::{Counts, Gate};

/// Runs of zeros at least this long (128 KiB) become holes. Below, writing
/// zeros is quicker than changing the file's map and everybody's page tables.
const HOLE_PAGES_MIN: u32 = 32;

/// Bodies that are in memory.
pub(crate) fn place_bodies(
    block: &Block,
    mapping: &Mapping,
    gate: &Gate,
    epoch: Epoch,
    pages: &[PageIndex],
    bytes: &[u8],
) -> Result<Counts, PlaceError> {
    let span = block.span_of_pages(pages)?;
    let mut counts = Counts::default();
    let _guard = block.lock.lock(span);
    gate.check()?;
    for (&page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
        if !block.versions.claim(page, epoch) {
            counts.stale += 1;
            continue;
        }
        block.versions.set_nonzero(page);
        mapping.write(page.offset(), bytes).map_err(|error| block.ram_error(error))?;
        counts.placed += 1;
    }
    Ok(counts)
}

/// Bodies that are still in a socket: see the crate's third rule.
pub(crate) fn receive_bodies(
    block: &Block,
    mapping: &Mapping,
    gate: &Gate,
    epoch: Epoch,
    pages: &[PageIndex],
    socket: BorrowedFd<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Counts, PlaceError> {
    let span = block.span_of_pages(pages)?;
    let total_bytes = pages.len() * PAGE_BYTES;
    scratch.resize(scratch.len().max(PAGE_BYTES), 0);
    let mut received_bytes = 0;
    let mut stale = 0;
    while received_bytes < total_bytes {
        if received_bytes > 0 {
            await_bytes(socket).map_err(|error| block.ram_error(error))?;
        }
        let _guard = block.lock.lock(span.clone());
        gate.check()?;
        let mut pieces = [Piece::Scratch { bytes: 0 }; BATCH_PAGES];
        let rest = &pages[received_bytes / PAGE_BYTES..];
        let pieces = &mut pieces[..rest.len()];
        let skipped = plan(block, epoch, rest, received_bytes % PAGE_BYTES, pieces);
        if received_bytes == 0 {
            stale = skipped;
        }
        received_bytes += mapping
            .receive_ready(socket, pieces, scratch)
            .map_err(|error| block.ram_error(error))?;
    }
    let placed = pages.len() as u64 - stale;
    Ok(Counts { placed, stale, ..Counts::default() })
}

/// Where the bytes of `pages` go, the first `taken` being here already. Returns
/// how many pages are out of date.
fn plan(
    block: &Block,
    epoch: Epoch,
    pages: &[PageIndex],
    taken: usize,
    pieces: &mut [Piece],
) -> u64 {
    let mut stale = 0;
    let mut taken = taken;
    for (piece, &page) in pieces.iter_mut().zip(pages) {
        let bytes = PAGE_BYTES - taken;
        *piece = if block.versions.claim(page, epoch) {
            block.versions.set_nonzero(page);
            Piece::Ram { offset: page.offset() + taken as u64, bytes }
        } else {
            stale += 1;
            Piece::Scratch { bytes }
        };
        taken = 0;
    }
    stale
}

/// Runs of one byte.
pub(crate) fn place_fills(
    block: &Block,
    mapping: &Mapping,
    gate: &Gate,
    epoch: Epoch,
    fills: &[Fill],
) -> Result<Counts, PlaceError> {
    let span = block.span_of_fills(fills)?;
    let mut counts = Counts::default();
    let _guard = block.lock.lock(span);
    gate.check()?;
    for fill in fills {
        let mut run = fill.first.0..fill.first.0;
        for page in (fill.first.0..).take(fill.count as usize).map(PageIndex) {
            let is_new = block.versions.claim(page, epoch);
            if is_new && (fill.byte != 0 || block.versions.may_be_nonzero(page)) {
                run.end = page.0 + 1;
                continue;
            }
            counts.stale += u64::from(!is_new);
            counts.fills_skipped += u64::from(is_new);
            counts.fills_written += write_run(block, mapping, run, fill.byte)?;
            run = page.0 + 1..page.0 + 1;
        }
        counts.fills_written += write_run(block, mapping, run, fill.byte)?;
    }
    Ok(counts)
}

/// Writes `byte` to all of `run`, and returns how many pages that are.
fn write_run(
    block: &Block,
    mapping: &Mapping,
    run: Range<u32>,
    byte: u8,
) -> Result<u64, PlaceError> {
    let pages = run.end - run.start;
    if pages == 0 {
        return Ok(0);
    }
    let (offset, bytes) = (PageIndex(run.start).offset(), PageIndex(pages).offset());
    if byte != 0 {
        block.versions.set_nonzero_all(run);
        mapping.fill(offset, bytes, byte)
    } else {
        zero(mapping, offset, bytes, pages).inspect(|()| block.versions.set_zero_all(run))
    }
    .map_err(|error| block.ram_error(error))?;
    Ok(u64::from(pages))
}

fn zero(mapping: &Mapping, offset: u64, bytes: u64, pages: u32) -> Result<(), RamError> {
    // A hole in huge pages loses its reservation, and QEMU may be killed when
    // the guest next writes there: they keep their memory.
    let can_be_hole = pages >= HOLE_PAGES_MIN && !mapping.file().is_huge();
    if can_be_hole && mapping.punch(offset, bytes).is_ok() {
        return Ok(());
    }
    mapping.fill(offset, bytes, 0)
}
