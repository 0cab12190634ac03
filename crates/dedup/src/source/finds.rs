//! Whether content is looked up at the destination, by how much of it was found there.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// So many pages, 16 MiB, are looked up before the destination counts as having nothing.
const MISSED_MAX: u64 = 4096;
/// One page found of so many is little.
const FEW: usize = 32;
/// Then one batch of so many is looked up, to learn when there is something after all.
const ONE_IN: u64 = 8;

/// What looking pages up has found.
#[derive(Debug, Default)]
pub(super) struct Finds {
    /// Pages that were looked up since enough of a batch was found.
    missed: AtomicU64,
    /// Batches since then that might have been looked up.
    batches: AtomicU64,
}

impl Finds {
    /// Of so many pages of a batch, these were found.
    pub(super) fn found(&self, found: usize, of: usize) {
        if found * FEW >= of {
            self.missed.store(0, Relaxed);
        } else {
            self.missed.fetch_add(of as u64, Relaxed);
        }
    }

    /// Whether the next batch should be looked up.
    pub(super) fn are_likely(&self) -> bool {
        self.missed.load(Relaxed) < MISSED_MAX
            || self.batches.fetch_add(1, Relaxed).is_multiple_of(ONE_IN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_that_has_nothing_is_asked_less_until_it_has_something() {
        let finds = Finds::default();
        let asked = || (0..64).filter(|_| finds.are_likely()).count();
        let miss = |batches| (0..batches).for_each(|_| finds.found(3, 128));
        assert_eq!(asked(), 64);
        miss(31);
        assert_eq!(asked(), 64);
        miss(1);
        assert_eq!(asked(), 8);
        finds.found(4, 128);
        assert_eq!(asked(), 64);
        miss(31);
        assert_eq!(asked(), 64);
        miss(1);
        assert_eq!(asked(), 8);
    }
}
