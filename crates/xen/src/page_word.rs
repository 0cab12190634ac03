//! The number and type of a page in PAGE_DATA.

use page::{BlockId, PageIndex};

use crate::StreamError;

const NUMBER_BITS: u32 = 52;
const KIND_SHIFT: u32 = 60;

/// What a page is to its domain. Page tables contain page numbers in the stream, which the receiver
/// replaces by machine pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PageKind {
    /// A page of data.
    Normal = 0,
    /// A page table of level 1.
    L1 = 1,
    /// A page table of level 2.
    L2 = 2,
    /// A page table of level 3.
    L3 = 3,
    /// A page table of level 4.
    L4 = 4,
    /// A page table of level 1 that the domain has pinned.
    L1Pinned = 9,
    /// A page table of level 2 that the domain has pinned.
    L2Pinned = 10,
    /// A page table of level 3 that the domain has pinned.
    L3Pinned = 11,
    /// A page table of level 4 that the domain has pinned.
    L4Pinned = 12,
    /// A page with a hardware error, without a body.
    Broken = 13,
    /// A page that is allocated without a body.
    AllocateOnly = 14,
    /// Not a page of the domain, or no longer.
    Invalid = 15,
}

impl PageKind {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::Normal,
        Self::L1,
        Self::L2,
        Self::L3,
        Self::L4,
        Self::L1Pinned,
        Self::L2Pinned,
        Self::L3Pinned,
        Self::L4Pinned,
        Self::Broken,
        Self::AllocateOnly,
        Self::Invalid,
    ];

    /// Whether the page's bytes are in the stream.
    #[must_use]
    pub fn has_body(self) -> bool {
        !matches!(self, Self::Broken | Self::AllocateOnly | Self::Invalid)
    }

    /// The block of batches with pages of this kind.
    #[must_use]
    pub fn block(self) -> BlockId {
        BlockId(u16::from(self as u8))
    }

    /// The kind of pages in batches of this block.
    #[must_use]
    pub fn of_block(block: BlockId) -> Option<Self> {
        Self::from_number(block.0.into())
    }

    fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| u64::from(*kind as u8) == number)
    }
}

/// A page's number and type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageWord {
    /// Its number: a guest's physical address / 4 KiB.
    pub page: PageIndex,
    /// Its type.
    pub kind: PageKind,
}

impl PageWord {
    /// Parses a word of PAGE_DATA.
    pub(crate) fn parse(word: u64) -> Result<Self, StreamError> {
        let number = word & ((1 << KIND_SHIFT) - 1);
        if number >> NUMBER_BITS != 0 {
            return Err(StreamError::Reserved);
        }
        let page = u32::try_from(number).map_err(|_| StreamError::PageNumber { number })?;
        let kind = word >> KIND_SHIFT;
        let kind =
            PageKind::from_number(kind).ok_or(StreamError::PageKind { kind, page: number })?;
        Ok(Self { page: PageIndex(page), kind })
    }

    /// The word as PAGE_DATA has it.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        u64::from(self.page.0) | u64::from(self.kind as u8) << KIND_SHIFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_written_as_it_was_read() {
        for kind in PageKind::ALL {
            let word = PageWord { page: PageIndex(u32::MAX), kind };
            assert_eq!(PageWord::parse(word.to_bits()), Ok(word));
            assert_eq!(PageKind::of_block(kind.block()), Some(kind));
        }
        let bodies = PageKind::ALL.into_iter().filter(|kind| kind.has_body()).count();
        assert_eq!(bodies, 9);
    }

    #[test]
    fn words_with_another_meaning_are_refused() {
        assert_eq!(PageWord::parse(1 << 52), Err(StreamError::Reserved));
        assert_eq!(PageWord::parse(1 << 32), Err(StreamError::PageNumber { number: 1 << 32 }));
        for kind in 5..9 {
            let error = StreamError::PageKind { kind, page: 7 };
            assert_eq!(PageWord::parse(kind << 60 | 7), Err(error));
        }
    }
}
