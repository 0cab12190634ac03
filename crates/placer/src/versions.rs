//! What is known about each page of a block: which version was written last, and whether it may
//! hold anything but zeros.
//!
//! Both are accessed only for pages whose range the caller has locked. They are atomics because
//! other threads may have locked neighbours in a word, or in the table. The range lock orders the
//! values.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use bytemuck::allocation::try_zeroed_slice_box;
use page::{Epoch, PageIndex};

#[derive(Debug)]
pub(crate) struct Versions {
    /// The epoch of the latest write, from when it started. 0 also for pages that were never
    /// written, since 0 is not newer than anything.
    epochs: Box<[AtomicU32]>,
    /// A bit for each page that may hold anything but zeros.
    nonzero: Box<[AtomicU64]>,
}

impl Versions {
    /// For `pages` pages, all of them zero or all of them unknown. None if memory can't be
    /// reserved: the source dictates a block's size.
    pub(crate) fn new(pages: usize, zero: bool) -> Option<Self> {
        // The tables take no memory until they are written.
        let epochs = try_zeroed_slice_box(pages).ok()?;
        let nonzero: Box<[AtomicU64]> = try_zeroed_slice_box(pages.div_ceil(64)).ok()?;
        if !zero {
            nonzero.iter().for_each(|word| word.store(u64::MAX, Relaxed));
        }
        Some(Self { epochs, nonzero })
    }

    /// Whether content of `epoch` is not older than that of `page`. If so, it counts as the
    /// page's newest from now on.
    pub(crate) fn claim(&self, page: PageIndex, epoch: Epoch) -> bool {
        let last = &self.epochs[page.0 as usize];
        if last.load(Relaxed) > epoch.0 {
            return false;
        }
        last.store(epoch.0, Relaxed);
        true
    }

    /// The epoch of the content of `page`.
    pub(crate) fn of(&self, page: PageIndex) -> Epoch {
        Epoch(self.epochs[page.0 as usize].load(Relaxed))
    }

    pub(crate) fn may_be_nonzero(&self, page: PageIndex) -> bool {
        let (word, bit) = self.place(page);
        word.load(Relaxed) & bit != 0
    }

    pub(crate) fn set_nonzero(&self, page: PageIndex) {
        let (word, bit) = self.place(page);
        // Read first: most pages have the bit after the first pass, and a write would take the
        // cache line from the other lanes.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Relaxed);
        }
    }

    pub(crate) fn set_zero(&self, page: PageIndex) {
        let (word, bit) = self.place(page);
        word.fetch_and(!bit, Relaxed);
    }

    fn place(&self, page: PageIndex) -> (&AtomicU64, u64) {
        (&self.nonzero[page.0 as usize / 64], 1 << (page.0 % 64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_content_is_refused_and_equal_is_taken_again() {
        let versions = Versions::new(2, true).unwrap();
        let page = PageIndex(1);
        assert!(versions.claim(page, Epoch(0)));
        assert!(versions.claim(page, Epoch(3)));
        assert!(versions.claim(page, Epoch(3)));
        assert!(!versions.claim(page, Epoch(2)));
        assert!(versions.claim(PageIndex(0), Epoch(2)));
        assert!(versions.claim(page, Epoch(u32::MAX)));
        assert!(!versions.claim(page, Epoch(3)));
    }

    #[test]
    fn each_page_has_its_own_bit() {
        for zero in [true, false] {
            let versions = Versions::new(130, zero).unwrap();
            assert!((0..130).all(|page| versions.may_be_nonzero(PageIndex(page)) != zero));
        }
        let versions = Versions::new(130, true).unwrap();
        (60..70).for_each(|page| versions.set_nonzero(PageIndex(page)));
        versions.set_zero(PageIndex(64));
        for page in 0..130 {
            let expected = (60..70).contains(&page) && page != 64;
            assert_eq!(versions.may_be_nonzero(PageIndex(page)), expected, "page {page}");
        }
    }

    /// It must not end the agent, which has other migrations.
    #[test]
    fn a_table_that_cannot_be_had_is_refused() {
        assert!(Versions::new(usize::MAX >> 8, true).is_none());
        assert!(Versions::new(0, false).is_some());
    }
}
