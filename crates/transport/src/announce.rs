//! Pages that are announced to the destination before QEMU hands them over. What it
//! can get from elsewhere it starts to fetch at once.

use content::Name;
use page::{BATCH_PAGES, BlockId, Epoch, PageIndex};
use wire::DiskPlace;

use crate::error::LanesError;
use crate::lanes::Lanes;
use crate::load::Announcement;
use crate::namer::{Labels, RereadPages};

/// Room for one announcement. Until it is queued, or this is dropped, lanes are not
/// drained: what is handed over meanwhile may rely on it.
#[derive(Debug)]
#[must_use = "lanes wait for it"]
pub struct Reserved<'l> {
    lanes: &'l Lanes,
    labels: Labels,
    pages: Vec<PageIndex>,
    block: BlockId,
    epoch: Epoch,
    is_over: bool,
}

impl Lanes {
    /// Room for one batch of pages of a block. Blocks while the destination waits for
    /// too much already. None once no more is taken, or if it is `over`: whoever
    /// makes it so calls [`Lanes::wake_reserving`].
    pub fn reserve(
        &self,
        (block, epoch): (BlockId, Epoch),
        over: impl Fn() -> bool,
    ) -> Option<Reserved<'_>> {
        self.queue().reserve(over)?;
        let (labels, pages) = (Labels::default(), Vec::with_capacity(BATCH_PAGES));
        Some(Reserved { lanes: self, labels, pages, block, epoch, is_over: false })
    }

    /// Who waits for room looks whether it is over.
    pub fn wake_reserving(&self) {
        self.queue().wake_reserving();
    }
}

impl Reserved<'_> {
    /// One page more, and where a disk has its content. Its body can be read once
    /// more, and need not be sent if it comes as it is.
    pub fn add(&mut self, page: PageIndex, name: Name, place: DiskPlace) {
        self.pages.push(page);
        self.labels.names.push(name);
        self.labels.places.push(Some(place));
    }

    /// Tells the destination, or nobody if there is no page.
    pub fn tell(mut self) {
        let pages = std::mem::take(&mut self.pages);
        if !pages.is_empty() {
            let reread = RereadPages::new(self.block, self.epoch, pages);
            let labels = std::mem::take(&mut self.labels);
            self.lanes.queue().announce(Some(Announcement { reread, labels }));
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
            // Pages that others have left out already would be lost.
            self.lanes.queue().fail(LanesError::Stopped);
        }
        self.lanes.queue().announce(None);
    }
}

#[cfg(test)]
mod tests {
    use identity::Security;
    use page::Encoding;
    use wire::Token;

    use super::*;
    use crate::lanes::LanesPlan;

    /// No lane carries anything.
    fn lanes() -> Lanes {
        let plan = LanesPlan {
            endpoints: Vec::new(),
            peer: "b".to_owned(),
            security: Security::Plaintext,
            token: Token([0; 16]),
            encoding: Encoding::Raw,
            stale_filter: None,
            namer: None,
        };
        Lanes::start(plan).unwrap()
    }

    fn reserve(lanes: &Lanes) -> Option<Reserved<'_>> {
        lanes.reserve((BlockId(0), Epoch(0)), || false)
    }

    const PLACE: DiskPlace = DiskPlace { disk: 0, sector: 8 };

    #[test]
    fn lanes_are_not_drained_while_a_batch_is_reserved() {
        let lanes = lanes();
        let reserved = reserve(&lanes).unwrap();
        let mut other = reserve(&lanes).unwrap();
        std::thread::scope(|scope| {
            let drained = scope.spawn(|| lanes.wait_drained());
            other.add(PageIndex(3), Name([1; 20]), PLACE);
            other.tell();
            drop(reserved);
            assert_eq!(lanes.delivered().backlog_bytes, 4096);
            let next = lanes.queue().take(|| false, None);
            let crate::queue::Work::Send(load @ crate::Load::Announce(_)) = next else { panic!() };
            assert!(!drained.is_finished());
            lanes.queue().placed(load);
            drained.join().unwrap().unwrap();
        });
        assert_eq!(lanes.delivered().backlog_bytes, 0);
        lanes.close();
        assert!(reserve(&lanes).is_none());
    }

    /// Others have left it out already, so it would be lost.
    #[test]
    fn an_announcement_that_is_never_made_ends_the_lanes() {
        let lanes = lanes();
        drop(reserve(&lanes));
        assert!(lanes.failure().is_none());
        let mut reserved = reserve(&lanes).unwrap();
        reserved.add(PageIndex(3), Name([1; 20]), PLACE);
        drop(reserved);
        assert!(lanes.failure().is_some());
        assert!(reserve(&lanes).is_none());
    }
}
