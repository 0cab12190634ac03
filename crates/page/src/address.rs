//! The address of a page, and which of its versions a batch carries.

use std::fmt;

/// Bytes of a guest page: x86's target page, the unit of QEMU's stream.
pub const PAGE_BYTES: usize = 4096;

/// The number of a page within its RAM block (offset / [`PAGE_BYTES`]).
///
/// 32 bits of pages reach 16 TiB in one block, beyond what QEMU boots today.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u32);

impl PageIndex {
    /// The page that starts at byte `offset` of its block; none if the offset is
    /// not page-aligned or is out of reach.
    #[must_use]
    pub fn from_offset(offset: u64) -> Option<Self> {
        let page_bytes = PAGE_BYTES as u64;
        if !offset.is_multiple_of(page_bytes) {
            return None;
        }
        u32::try_from(offset / page_bytes).ok().map(Self)
    }

    /// The page's first byte, counted from the start of its block.
    #[must_use]
    pub fn offset(self) -> u64 {
        u64::from(self.0) * PAGE_BYTES as u64
    }
}

/// The position of a RAM block in the block list that QEMU announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u16);

/// The number of QEMU's passes (or RAM sections) that ended before it sent a
/// page.
///
/// Of two versions of a page the one with the higher epoch is newer, whatever
/// order lanes deliver in. Two versions of the same epoch (from a batch that was
/// sent twice, or from QEMU 7.2, whose multifd can send a page twice) are
/// interchangeable: if they differ, a later epoch carries the page again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u32);

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_page_starts_within_reach_are_pages() {
        assert_eq!(PageIndex::from_offset(8192), Some(PageIndex(2)));
        assert_eq!(PageIndex::from_offset(8193), None);
        assert_eq!(PageIndex::from_offset(1 << 44), None);
        assert_eq!(PageIndex::from_offset((1 << 44) - 4096), Some(PageIndex(u32::MAX)));
        assert_eq!(PageIndex(u32::MAX).offset(), (1 << 44) - 4096);
    }
}
