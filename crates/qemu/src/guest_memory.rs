//! Where in QEMU's RAM blocks a page of the guest's memory is.
//!
//! A guest addresses its memory physically; QEMU's stream, and code that accesses QEMU's
//! memory, by block and offset. Between the two are the gap below 4 GiB, NUMA nodes and
//! plugged memory. QEMU reports it only as text for people (`info mtree`): a line that
//! can't be parsed is left out, and so are the pages in it.

use serde_json::json;

use crate::qmp::{Qmp, QmpError};

const PAGE_BYTES: u64 = cachemap::PAGE_BYTES;
/// VMs have about ten; with memory plugged in small pieces, some hundred.
const PIECES_MAX: usize = 1 << 16;
/// Where the gap of a PC's memory ends.
const GAP_ENDS: u64 = 4 << 30;
/// The address space that the guest's CPUs see.
const MEMORY: &str = "AS \"memory\",";
/// What QEMU appends to a range that its accelerator has mapped, once for each address space
/// of the view in which it has. Of QEMU 7.2 to 11.1 only KVM tells.
const MAPPED: &str = " KVM";

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOffset {
    /// The block's index among those that were given.
    pub block: usize,
    /// The page's first byte in it.
    pub offset: u64,
}

/// Where the pages of a guest's memory are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestMemory {
    /// Sorted by page, without overlaps.
    ranges: Vec<Range>,
}

/// The memory of a PC: its blocks in order, up to the gap below 4 GiB and on above
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcMemory {
    /// Names and lengths.
    pub blocks: Vec<(String, u64)>,
    /// Where the gap starts.
    pub below_4g: u64,
}

/// Pages that are contiguous in the guest and in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first_page: u64,
    end_page: u64,
    place: BlockOffset,
}

/// A line about RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    name: String,
    /// Its first byte in the guest.
    address: u64,
    bytes: u64,
    /// Its first byte in the block.
    offset: u64,
}

impl GuestMemory {
    /// Queries QEMU. `blocks` are the names and lengths of RAM blocks, as in QEMU's
    /// stream: memory outside of them has no place.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn of<'a>(
        qmp: &Qmp,
        blocks: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Result<Self, QmpError> {
        let command = json!({ "command-line": "info mtree -f" });
        let answer = qmp.execute("human-monitor-command", command)?;
        Ok(Self::read(answer.as_str().unwrap_or_default(), blocks))
    }

    /// Parses the output of QEMU's `info mtree -f`.
    #[must_use]
    pub fn read<'a>(text: &str, blocks: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        Self::in_pieces(&pieces(text), blocks)
    }

    /// The layout of a PC. The firmware's area below 1 MiB counts as memory.
    #[must_use]
    pub fn of_pc<'a>(pc: &PcMemory, blocks: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let (mut pieces, mut address) = (Vec::new(), 0);
        for (name, bytes) in &pc.blocks {
            let mut offset = 0;
            while offset < *bytes {
                if address == pc.below_4g {
                    address = GAP_ENDS;
                }
                let room = if address < GAP_ENDS { pc.below_4g - address } else { u64::MAX };
                let bytes = room.min(bytes - offset);
                pieces.push(Piece { name: name.clone(), address, bytes, offset });
                (address, offset) = (address.saturating_add(bytes), offset + bytes);
            }
        }
        Self::in_pieces(&pieces, blocks)
    }

    fn in_pieces<'a>(pieces: &[Piece], blocks: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let blocks: Vec<(&str, u64)> = blocks.into_iter().collect();
        let mut ranges: Vec<Range> =
            pieces.iter().filter_map(|piece| Range::of(piece, &blocks)).collect();
        ranges.sort_by_key(|range| range.first_page);
        // A flat view has no overlaps: with some, the text was misunderstood.
        let mut end = 0;
        let overlaps = ranges.iter().any(|range| {
            let overlaps = range.first_page < end;
            end = range.end_page.max(end);
            overlaps
        });
        if overlaps {
            ranges.clear();
        }
        Self { ranges }
    }

    /// Where a page is, and how many of `pages` from it on are contiguous there; `None` if it is in
    /// no block.
    #[must_use]
    pub fn lookup_run(&self, page: u64, pages: u64) -> Option<(BlockOffset, u64)> {
        let after = self.ranges.partition_point(|range| range.first_page <= page);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        let left = range.end_page.checked_sub(page).filter(|left| *left > 0)?;
        let into = (page - range.first_page) * PAGE_BYTES;
        let place = BlockOffset { offset: range.place.offset + into, ..range.place };
        Some((place, left.min(pages)))
    }

    /// How many pages have a place.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(|range| range.end_page - range.first_page).sum()
    }
}

impl Range {
    /// The whole pages of a piece, if it lies within a block.
    fn of(piece: &Piece, blocks: &[(&str, u64)]) -> Option<Self> {
        let named = |(name, _): &&(&str, u64)| is_name_of(name, &piece.name);
        let mut found = blocks.iter().enumerate().filter(|(_, block)| named(block));
        let (block, (_, bytes)) = found.next()?;
        let is_within = piece.offset.checked_add(piece.bytes)? <= *bytes;
        if found.next().is_some() || !is_within {
            return None;
        }
        let first_page = piece.address.div_ceil(PAGE_BYTES);
        let end_page = piece.address.checked_add(piece.bytes)? / PAGE_BYTES;
        let offset = piece.offset + (first_page * PAGE_BYTES - piece.address);
        let is_whole = first_page < end_page && offset.is_multiple_of(PAGE_BYTES);
        is_whole.then_some(Self { first_page, end_page, place: BlockOffset { block, offset } })
    }
}

/// Whether a block has that memory, by their names. In the stream, the block of a device on a
/// bus, such as virtio-mem's, is called `0000:00:01.0/vm0`, and its memory only `vm0`.
fn is_name_of(block: &str, memory: &str) -> bool {
    block == memory || block.rsplit_once('/').is_some_and(|(_, last)| last == memory)
}

/// The RAM that the guest's CPUs see. Each view names its address spaces before its
/// ranges.
fn pieces(text: &str) -> Vec<Piece> {
    let mut is_meant = false;
    let mut pieces = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with("FlatView #") {
            is_meant = false;
        } else if line.starts_with(MEMORY) {
            is_meant = true;
        } else if is_meant && pieces.len() < PIECES_MAX {
            pieces.extend(piece(line));
        }
    }
    pieces
}

/// Parses `FIRST-LAST (prio N, KIND): NAME`, then ` @OFFSET` where that isn't 0, and then
/// [`MAPPED`]. A `rom` may be RAM that the firmware has write-protected, but it is too small
/// to matter.
fn piece(line: &str) -> Option<Piece> {
    let (addresses, rest) = line.split_once(" (prio ")?;
    let (kind, name) = rest.split_once("): ")?;
    let (_, kind) = kind.split_once(", ")?;
    if !matches!(kind, "ram" | "nv-ram") {
        return None;
    }
    let (first, last) = addresses.split_once('-')?;
    let (address, last) = (hex(first)?, hex(last)?);
    // No block has a space in its name.
    let name = name.trim_end_matches(MAPPED);
    let at_offset = name.rsplit_once(" @").and_then(|(name, offset)| Some((name, hex(offset)?)));
    let (name, offset) = at_offset.unwrap_or((name, 0));
    let bytes = last.checked_sub(address)?.checked_add(1)?;
    Some(Piece { name: name.to_owned(), address, bytes, offset })
}

/// Parses an address as QEMU writes it, with all 16 digits.
fn hex(text: &str) -> Option<u64> {
    let is_one = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_one.then(|| u64::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests;
