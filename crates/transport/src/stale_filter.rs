//! A last look at a batch before a lane sends it.

use page::Batch;

use crate::reluctance::Reluctance;

/// Knows which pages of a batch need not be sent any more.
pub trait StaleFilter: std::fmt::Debug + Send + Sync {
    /// Takes such pages out of the batch, and returns how many those were.
    /// `scratch` is the lane's own, kept from batch to batch.
    fn drop_stale(&self, batch: &mut Batch, scratch: &mut Vec<u8>) -> usize;
}

/// Batches passed by between two looks where the last ones found nothing.
const PASSED_BY_MAX: u32 = 16;

/// One lane's use of the filter.
#[derive(Debug)]
pub(crate) struct Filtering {
    reluctance: Reluctance,
    scratch: Vec<u8>,
}

impl Default for Filtering {
    fn default() -> Self {
        Self { reluctance: Reluctance::up_to(PASSED_BY_MAX), scratch: Vec::new() }
    }
}

impl Filtering {
    /// Has the filter look at a batch, more rarely where it finds nothing.
    /// Returns how many pages it took out.
    pub(crate) fn drop_stale(
        &mut self,
        stale_filter: &dyn StaleFilter,
        batch: &mut Batch,
    ) -> usize {
        if batch.bodies().is_empty() || !self.reluctance.try_next() {
            return 0;
        }
        let dropped = stale_filter.drop_stale(batch, &mut self.scratch);
        self.reluctance.tried(dropped > 0);
        dropped
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use page::{PageIndex, Pool, SLOT_BYTES};

    use super::*;

    /// Takes out odd pages from the tenth batch on.
    #[derive(Debug, Default)]
    struct Odd {
        looks: AtomicU32,
    }

    impl StaleFilter for Odd {
        fn drop_stale(&self, batch: &mut Batch, _: &mut Vec<u8>) -> usize {
            let pages: Vec<_> = batch.bodies().iter().map(|body| body.page.0).collect();
            let looks = self.looks.fetch_add(1, Relaxed) + 1;
            batch.retain_bodies(|nth, _| looks < 10 || pages[nth].is_multiple_of(2))
        }
    }

    #[test]
    fn a_sieve_that_finds_nothing_is_asked_more_rarely_until_it_finds_something() {
        let pool = Pool::new(SLOT_BYTES);
        let (stale_filter, mut filtering) = (Odd::default(), Filtering::default());
        let batch = || {
            let mut batch = pool.take().unwrap();
            (0..8).for_each(|page| batch.push_body(PageIndex(page), 4096 * page as usize));
            batch
        };
        let mut passed = 0;
        while filtering.drop_stale(&stale_filter, &mut batch()) == 0 {
            passed += 1;
        }
        // 9 looks in vain, with 1, 2, 4, 8 and then 16 batches between them.
        assert_eq!(passed, 9 + 1 + 2 + 4 + 8 + 5 * PASSED_BY_MAX);
        let mut next = batch();
        assert_eq!(filtering.drop_stale(&stale_filter, &mut next), 4);
        let left: Vec<_> = next.bodies().iter().map(|body| body.page.0).collect();
        assert_eq!(left, [0, 2, 4, 6]);
    }
}
