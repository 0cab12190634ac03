//! Drops pages that the guest has changed since QEMU handed them over.
//!
//! If a page that waited for its lane differs from QEMU's RAM, the guest wrote it after
//! QEMU had copied it. QEMU cleared the page's dirty bit before it copied, so the write
//! has set it again, and QEMU sends the page once more before the VM stops for good: the
//! old content need not be sent. Where the link is the bottleneck and the guest writes,
//! that is a good part of all bytes.
//!
//! A page that is all zeros by now is sent as it was: memory that a balloon returns to the
//! host reads as zeros, without a write that set the dirty bit. A guest that reports free
//! pages to QEMU clears dirty bits: such a VM has no filter.

use std::sync::Arc;

use audit::HandedOver;
use page::{BATCH_PAGES, Batch, Buffer, PAGE_BYTES, PageIndex, is_zero};
use ram::Numbered;

use crate::reluctance::Reluctance;

/// Compares batches with the source QEMU's RAM.
#[derive(Clone, Debug)]
pub struct StaleFilter {
    /// The source QEMU's RAM.
    pub ram: Arc<Numbered>,
    /// The audit's record of dropped pages.
    pub handed_over: Arc<HandedOver>,
}

/// Most batches skipped between two comparisons when the last ones found nothing.
const PASSED_BY_MAX: u32 = 16;

/// One lane's use of the filter.
#[derive(Debug)]
pub(crate) struct Filtering {
    reluctance: Reluctance,
    scratch: Buffer,
}

impl Default for Filtering {
    fn default() -> Self {
        Self { reluctance: Reluctance::up_to(PASSED_BY_MAX), scratch: Buffer::default() }
    }
}

impl Filtering {
    /// Removes stale pages from a batch, and compares more rarely while there are none.
    /// Returns how many it removed.
    pub(crate) fn drop_stale(&mut self, filter: &StaleFilter, batch: &mut Batch) -> usize {
        if batch.bodies().is_empty() || !self.reluctance.try_next() {
            return 0;
        }
        let dropped = self.compare(filter, batch);
        self.reluctance.tried(dropped > 0);
        dropped
    }

    fn compare(&mut self, filter: &StaleFilter, batch: &mut Batch) -> usize {
        let StaleFilter { ram, handed_over } = filter;
        if !ram.reaches(batch.block) {
            return 0;
        }
        let bytes = batch.bodies().len() * PAGE_BYTES;
        let now = self.scratch.room(bytes);
        let pages = batch.bodies().iter().map(|body| body.page);
        // A QEMU that has ended is noticed elsewhere.
        if !ram.read(batch.block, pages, now) {
            return 0;
        }
        let mut pages = [PageIndex::default(); BATCH_PAGES];
        for (page, body) in pages.iter_mut().zip(batch.bodies()) {
            *page = body.page;
        }
        let left_out = handed_over.left_out(batch.block, batch.epoch);
        batch.retain_bodies(|nth, sent| {
            let now = &now[nth * PAGE_BYTES..][..PAGE_BYTES];
            let comes_again = now != sent && !is_zero(now);
            if comes_again {
                left_out(pages[nth]);
            }
            !comes_again
        })
    }
}

#[cfg(test)]
mod tests {
    use page::{BlockId, Pool, SLOT_BYTES};
    use ram::Mapping;

    use super::*;

    #[test]
    fn a_filter_that_finds_nothing_compares_more_rarely_until_it_finds_something() {
        let pool = Pool::new(3 * SLOT_BYTES);
        let mapping = Arc::new(Mapping::own(8 * PAGE_BYTES as u64));
        let filter = StaleFilter { ram: Arc::default(), handed_over: Arc::default() };
        filter.ram.announce([Some(Arc::clone(&mapping))].into_iter());
        let mut filtering = Filtering::default();
        let batch = || {
            let mut batch = pool.take().unwrap();
            batch.buffer_mut().fill(0);
            (0..8).for_each(|page| batch.push_body(PageIndex(page), 4096 * page as usize));
            batch
        };
        // 9 comparisons in vain, with 1, 2, 4, 8 and then 16 batches between them.
        let tenth = 9 + 1 + 2 + 4 + 8 + 5 * PASSED_BY_MAX;
        let mut passed = 0;
        while filtering.drop_stale(&filter, &mut batch()) == 0 {
            passed += 1;
            if passed == tenth - PASSED_BY_MAX {
                // After the ninth.
                let odd = (1..8_u64).step_by(2).map(|page| page * PAGE_BYTES as u64);
                odd.for_each(|offset| mapping.fill(offset, PAGE_BYTES as u64, 1).unwrap());
            }
        }
        assert_eq!(passed, tenth);
        let mut next = batch();
        assert_eq!(filtering.drop_stale(&filter, &mut next), 4);
        let left: Vec<_> = next.bodies().iter().map(|body| body.page.0).collect();
        assert_eq!(left, [0, 2, 4, 6]);
        // Like a page that a balloon has returned.
        let mut given_back = pool.take().unwrap();
        given_back.buffer_mut().fill(3);
        (0..8).for_each(|page| given_back.push_body(PageIndex(page), 4096 * page as usize));
        assert_eq!(filtering.drop_stale(&filter, &mut given_back), 4);
        let left: Vec<_> = given_back.bodies().iter().map(|body| body.page.0).collect();
        assert_eq!(left, [0, 2, 4, 6], "they hold zeros, the others ones");
        let mut unknown = batch();
        unknown.block = BlockId(1);
        assert_eq!(filtering.drop_stale(&filter, &mut unknown), 0);
    }
}
