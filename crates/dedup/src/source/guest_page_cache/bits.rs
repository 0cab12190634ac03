//! What has happened to each page of a block, as far as it affects whether an announcement still
//! holds.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use page::PageIndex;

/// Bits for each page of a block.
#[derive(Debug)]
pub(super) struct Bits {
    /// Handed over by QEMU.
    handed: Box<[AtomicU64]>,
    /// Handed over by QEMU more than once.
    again: Box<[AtomicU64]>,
    /// Read again for the destination, and possibly different from what was announced.
    read: Box<[AtomicU64]>,
}

/// Both sides set their bit before they look at the other's, so one of the two sees the other.
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

    /// Returns whether it was not set yet.
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
