//! A set of the pages of one batch.

use std::ops::{BitAnd, BitOr, BitOrAssign};

use crate::slot::BATCH_PAGES;

/// Pages of a batch, by their index in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSet(u128);

const _: () = assert!(BATCH_PAGES == u128::BITS as usize, "a batch's pages have a bit each");

impl PageSet {
    /// No page.
    pub const NONE: Self = Self(0);

    /// All pages of a batch that has so many.
    #[must_use]
    pub fn all(pages: usize) -> Self {
        if pages >= BATCH_PAGES { Self(u128::MAX) } else { Self((1 << pages) - 1) }
    }

    /// The pages whose bit is set, as on the wire.
    #[must_use]
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// A bit for each page, as on the wire.
    #[must_use]
    pub const fn bits(self) -> u128 {
        self.0
    }

    /// Whether it has this page.
    #[must_use]
    pub fn has(self, nth: usize) -> bool {
        nth < BATCH_PAGES && self.0 >> nth & 1 == 1
    }

    /// Adds a page. One that no batch has is left out.
    pub fn insert(&mut self, nth: usize) {
        if nth < BATCH_PAGES {
            self.0 |= 1 << nth;
        }
    }

    /// Those of its pages that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether it has no page.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many pages it has.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The indices of its pages, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..BATCH_PAGES).filter(move |nth| self.has(*nth))
    }

    /// Of one item for each page of the batch, those of its pages.
    pub fn of<T>(self, items: &[T]) -> impl Iterator<Item = &T> {
        items.iter().enumerate().filter(move |(nth, _)| self.has(*nth)).map(|(_, item)| item)
    }
}

impl BitOr for PageSet {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for PageSet {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl BitAnd for PageSet {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl FromIterator<usize> for PageSet {
    fn from_iter<I: IntoIterator<Item = usize>>(pages: I) -> Self {
        let mut set = Self::NONE;
        pages.into_iter().for_each(|nth| set.insert(nth));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_batch_has_all_pages_and_no_set_has_more() {
        assert_eq!(PageSet::all(128).bits(), u128::MAX);
        assert_eq!(PageSet::all(500), PageSet::all(128));
        assert_eq!(PageSet::all(3).bits(), 0b111);
        assert!(PageSet::all(0).is_empty());
        assert!(PageSet::all(128).has(127) && !PageSet::all(128).has(128));
        let set: PageSet = [5, 127, 128, 5].into_iter().collect();
        assert!(set.iter().eq([5, 127]) && set.len() == 2);
        assert!(set.without(PageSet::all(6)).of(&[7; 128]).eq(&[7]));
    }
}
