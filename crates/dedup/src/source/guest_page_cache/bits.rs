//! What has happened to each page of a block, as far as it bears on what was told of
//! it ahead.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use page::PageIndex;

/// Bits for the pages of a block.
#[derive(Debug)]
pub(super) struct Bits {
    /// QEMU has handed it over.
    handed: Box<[AtomicU64]>,
    /// QEMU has handed it over more than once.
    again: Box<[AtomicU64]>,
    /// It was read anew for the destination, and may have been something else than
    /// what was told.
    read: Box<[AtomicU64]>,
}

/// Everything here is set before something else is looked at, on both sides: one of
/// the two sees the other.
impl Bits {
    pub(super) fn new(pages: u64) -> Self {
        let words = || (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { handed: words(), again: words(), read: words() }
    }

    pub(super) fn hand_over(&self, page: PageIndex) {
        if !set(&self.handed, page) {
            set(&self.again, page);
        }
    }

    pub(super) fn is_handed(&self, page: PageIndex) -> bool {
        is_set(&self.handed, page)
    }

    pub(super) fn is_handed_again(&self, page: PageIndex) -> bool {
        is_set(&self.again, page)
    }

    /// Says whether it was not yet.
    pub(super) fn read(&self, page: PageIndex) -> bool {
        set(&self.read, page)
    }

    pub(super) fn unread(&self, page: PageIndex) {
        if let Some((word, bit)) = place(&self.read, page) {
            word.fetch_and(!bit, SeqCst);
        }
    }

    pub(super) fn is_read(&self, page: PageIndex) -> bool {
        is_set(&self.read, page)
    }
}

fn place(words: &[AtomicU64], page: PageIndex) -> Option<(&AtomicU64, u64)> {
    Some((words.get(page.0 as usize / 64)?, 1 << (page.0 % 64)))
}

fn set(words: &[AtomicU64], page: PageIndex) -> bool {
    place(words, page).is_some_and(|(word, bit)| word.fetch_or(bit, SeqCst) & bit == 0)
}

fn is_set(words: &[AtomicU64], page: PageIndex) -> bool {
    place(words, page).is_some_and(|(word, bit)| word.load(SeqCst) & bit != 0)
}
