//! Pages that are announced to the destination before QEMU hands them over. It fetches at once
//! those that it can get from other providers.

use content::Name;
use page::{BATCH_PAGES, BlockId, Epoch, PageIndex};
use transport::{LanesError, Queue};
use wire::DiskLocation;

use super::errand::{Announcement, Errand, Kind};
use super::naming::Labels;
use super::reread::RereadPages;

/// Room for one announcement. Lanes are not drained until it is queued, or this is dropped: pages
/// handed over meanwhile may rely on it.
#[derive(Debug)]
#[must_use = "lanes wait for it"]
pub(super) struct Reserved<'q> {
    queue: &'q Queue<Errand>,
    labels: Labels,
    pages: Vec<PageIndex>,
    block: BlockId,
    epoch: Epoch,
    is_over: bool,
}

impl<'q> Reserved<'q> {
    /// Reserved for pages of that block.
    pub(super) fn new(queue: &'q Queue<Errand>, (block, epoch): (BlockId, Epoch)) -> Self {
        let (labels, pages) = (Labels::default(), Vec::with_capacity(BATCH_PAGES));
        Self { queue, labels, pages, block, epoch, is_over: false }
    }

    /// Adds a page, and the place of its content on a disk. Its body can be read again, and is
    /// not sent if QEMU hands it over unchanged.
    pub(super) fn add(&mut self, page: PageIndex, name: Name, place: DiskLocation) {
        self.pages.push(page);
        self.labels.names.push(name);
        self.labels.places.push(Some(place));
    }

    /// Queues the announcement, unless it has no page.
    pub(super) fn tell(mut self) {
        let pages = std::mem::take(&mut self.pages);
        if !pages.is_empty() {
            let reread = RereadPages::new(self.block, self.epoch, pages);
            let (bytes, labels) = (reread.bytes(), std::mem::take(&mut self.labels));
            let announcement = Errand(Kind::Announce(Announcement { reread, labels }));
            self.queue.submit_first(announcement, bytes);
            self.is_over = true;
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if !self.pages.is_empty() {
            // Batches may have left these pages out already, so they would be lost.
            self.queue.fail(LanesError::Stopped);
        }
        self.queue.give_up();
    }
}

#[cfg(test)]
mod tests {
    use transport::Change;

    use super::super::stage::tests::{lanes, stage};
    use super::*;

    const PLACE: DiskLocation = DiskLocation { disk: 0, sector: 8 };

    #[test]
    fn lanes_are_not_drained_while_a_batch_is_reserved() {
        let lanes = lanes();
        let stage = stage(&lanes);
        let reserve = || stage.reserve((BlockId(0), Epoch(0)), || false);
        let reserved = reserve().unwrap();
        let mut other = reserve().unwrap();
        std::thread::scope(|scope| {
            let drained = scope.spawn(|| lanes.wait_drained());
            other.add(PageIndex(3), Name([1; 20]), PLACE);
            other.tell();
            drop(reserved);
            assert_eq!(lanes.delivered().backlog_bytes, 4096);
            assert!(!drained.is_finished());
            // As if a lane had delivered it.
            lanes.queue().count(Change { left: 1, found_bytes: 4096, ..Change::default() });
            drained.join().unwrap().unwrap();
        });
        assert_eq!(lanes.delivered().backlog_bytes, 0);
        lanes.close();
        assert!(reserve().is_none());
    }

    /// Batches may have left the page out already, so it would be lost.
    #[test]
    fn an_announcement_that_is_never_made_ends_the_lanes() {
        let lanes = lanes();
        let stage = stage(&lanes);
        let reserve = || stage.reserve((BlockId(0), Epoch(0)), || false);
        drop(reserve());
        assert!(lanes.failure().is_none());
        let mut reserved = reserve().unwrap();
        reserved.add(PageIndex(3), Name([1; 20]), PLACE);
        drop(reserved);
        assert!(lanes.failure().is_some());
        assert!(reserve().is_none());
    }
}
