//! Which pages of the VM's memory are also on its disks, as the guest's helper reports.
//!
//! A separate thread queries the helper while the migration begins. Pages that were sent before
//! the helper's answer went over the network. The answer is a hint: the destination checks that
//! the disk's content has the page's name.

mod bits;
mod map;
mod query;

use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, OnceLock};

use page::{Batch, BlockId, Epoch, PageIndex};
use parking_lot::{Condvar, Mutex};
use wire::Announced;
#[cfg(test)]
use wire::DiskLocation;

use bits::Bits;
pub use map::Room;
use map::{Map, Parts, on_disks};
pub(crate) use map::{OnDisk, Places};
pub use query::GuestQuery;

/// What is known of the guest's page cache.
#[derive(Debug, Default)]
pub struct GuestPageCache {
    blocks: OnceLock<Blocks>,
    known: Mutex<Known>,
    /// Notified when more is known, or nothing more will be.
    changed: Condvar,
    over: AtomicBool,
    /// QEMU has handed over everything older than this epoch.
    all_before: AtomicU32,
}

/// What the helper has reported so far.
#[derive(Debug, Default)]
struct Known {
    parts: Parts,
    /// No more parts will follow.
    is_all: bool,
}

/// QEMU's blocks, in the order of their numbers.
#[derive(Debug)]
struct Blocks {
    names: Vec<String>,
    bits: Vec<Bits>,
}

impl GuestPageCache {
    /// QEMU's block list is known.
    pub(crate) fn announce(&self, blocks: &[Announced]) {
        let names = blocks.iter().map(|block| block.name.clone()).collect();
        let bits = blocks.iter().map(|block| Bits::new(block.bytes / cachemap::PAGE_BYTES));
        let _ = self.blocks.set(Blocks { names, bits: bits.collect() });
        self.wake();
    }

    /// The helper has reported another part.
    fn learn(&self, part: Map) {
        let mut known = self.known.lock();
        // Replaced, not changed: readers keep the list that they have.
        let parts = known.parts.iter().cloned().chain([Arc::new(part)]);
        known.parts = parts.collect();
        drop(known);
        self.changed.notify_all();
    }

    /// The note for the report if the helper fails now. What it reported before is still a valid
    /// hint.
    fn without_the_rest(&self, why: &str) -> String {
        if self.known.lock().parts.is_empty() {
            format!("no page is read from storage: {why}")
        } else {
            format!("only pages that the guest's helper had reported are read from storage: {why}")
        }
    }

    /// A complete report of a guest with one block.
    #[cfg(test)]
    pub(super) fn of_rows(
        block: &str,
        rows: impl Iterator<Item = (u32, u32, DiskLocation)>,
    ) -> Self {
        let cached = Self::default();
        cached.learn(Room::next_to(usize::MAX).take(Map::of_rows(block, rows)).0);
        cached.knows_all();
        cached
    }

    /// The report is complete.
    fn knows_all(&self) {
        self.known.lock().is_all = true;
        self.changed.notify_all();
    }

    /// Ends it: it is not needed any more.
    pub(crate) fn end(&self) {
        self.over.store(true, Relaxed);
        self.wake();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    fn wake(&self) {
        let _known = self.known.lock();
        self.changed.notify_all();
    }

    /// Waits for the part with that number, and for QEMU's block list. Returns the part in the
    /// order of its disks. None if there is no such part, or it has ended.
    pub(crate) fn wait(&self, part: usize) -> Option<Vec<OnDisk>> {
        let mut known = self.known.lock();
        loop {
            if self.is_over() {
                return None;
            }
            if let Some(announced) = self.blocks.get() {
                if let Some(part) = known.parts.get(part).cloned() {
                    drop(known);
                    return Some(on_disks(&announced.names, &part));
                }
                if known.is_all {
                    return None;
                }
            }
            self.changed.wait(&mut known);
        }
    }

    /// The places of a block's pages. None if nothing is known of it.
    pub(crate) fn of(&self, block: BlockId) -> Option<Places<'_>> {
        let announced = self.blocks.get()?;
        let (number, parts) = (usize::from(block.0), self.known.lock().parts.clone());
        let (name, bits) = (announced.names.get(number)?, announced.bits.get(number)?);
        Places::of(name, parts, bits)
    }

    /// QEMU hands these over, so they are not announced any more.
    pub(crate) fn hand_over(&self, batch: &Batch) {
        let bits = self.blocks.get().and_then(|all| all.bits.get(usize::from(batch.block.0)));
        let Some(bits) = bits else { return };
        batch.bodies().iter().for_each(|body| bits.hand_over(body.page));
        for fill in batch.fills() {
            let pages = fill.first.0..fill.first.0.saturating_add(fill.count);
            pages.for_each(|page| bits.hand_over(PageIndex(page)));
        }
    }

    /// QEMU has handed over everything older than this.
    pub(crate) fn all_before(&self, epoch: Epoch) {
        self.all_before.fetch_max(epoch.0, SeqCst);
    }

    pub(crate) fn has_all_before(&self, epoch: Epoch) -> bool {
        self.all_before.load(SeqCst) >= epoch.0
    }
}

#[cfg(test)]
mod tests {
    use content::Name;
    use page::Pool;

    use super::map::tests::map;
    use super::*;

    fn known() -> GuestPageCache {
        let cached = GuestPageCache::default();
        cached.learn(map());
        cached.knows_all();
        assert!(cached.of(BlockId(0)).is_none(), "not announced");
        let block = |name: &str| Announced { name: name.to_owned(), bytes: 1 << 20 };
        cached.announce(&["vga", "ram"].map(block));
        cached
    }

    #[test]
    fn parts_come_in_the_order_of_disks_until_all_is_known() {
        let cached = known();
        let rows = cached.wait(0).unwrap();
        let order = rows.iter().map(|row| (row.block.0, row.disk, row.first.0, row.pages));
        let order: Vec<_> = order.collect();
        assert_eq!(order, [(1, 0, 14, 1), (1, 1, 20, 2), (1, 1, 10, 4)]);
        assert!(cached.wait(1).is_none(), "there are no more");
        cached.learn(map());
        assert_eq!(cached.wait(1).unwrap(), rows);
        cached.end();
        assert!(cached.wait(0).is_none());
    }

    #[test]
    fn the_first_to_announce_or_hand_over_a_page_counts() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let [one, other, third] = [12, 21, 20].map(|page| places.find(PageIndex(page)).unwrap());
        let name = Name([7; 20]);
        assert!(places.tell(PageIndex(12), one, name));
        assert_eq!((places.handed_over(one), places.handed_over(other)), (Some(name), None));
        assert!(!places.tell(PageIndex(21), other, name), "QEMU was first");
        assert_eq!((places.told(one), places.told(other)), (Some(name), None));
        // QEMU handed it over before the helper reported its place.
        cached.hand_over(&batch(BlockId(1), &[20, 1 << 30], &[]));
        assert!(!places.tell(PageIndex(20), third, name));
        assert_eq!(places.handed_over(third), None);
    }

    fn batch(block: BlockId, bodies: &[u32], fills: &[u32]) -> Batch {
        let mut batch = Pool::new(1).take().unwrap();
        batch.block = block;
        bodies.iter().for_each(|page| batch.push_body(PageIndex(*page), 0));
        fills.iter().for_each(|page| batch.push_fill(PageIndex(*page), 0));
        batch
    }

    /// The page has had other content meanwhile, and that was sent.
    #[test]
    fn a_page_handed_over_again_is_not_left_out() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let pages = [10, 11, 12, 13].map(PageIndex);
        let name = Name([9; 20]);
        for page in pages {
            let found = places.find(page).unwrap();
            assert!(places.tell(page, found, name));
        }
        cached.hand_over(&batch(BlockId(1), &[10, 11], &[12, 13]));
        cached.hand_over(&batch(BlockId(1), &[11, 12], &[]));
        assert_eq!(pages.map(|page| places.has(page)), [Some(name), None, None, Some(name)]);
        cached.all_before(Epoch(3));
        cached.all_before(Epoch(2));
        assert!(cached.has_all_before(Epoch(3)) && !cached.has_all_before(Epoch(4)));
    }

    /// A page that was read again may not be what was announced. Until that is checked, QEMU's
    /// copy is sent.
    #[test]
    fn a_reread_page_is_not_left_out() {
        let cached = known();
        let mut places = cached.of(BlockId(1)).unwrap();
        let page = PageIndex(11);
        let found = places.find(page).unwrap();
        let name = Name([3; 20]);
        assert!(places.begin_to_read(page).is_none(), "nothing was told");
        assert!(places.tell(page, found, name));
        assert_eq!(places.has(page), Some(name));
        let reading = places.begin_to_read(page).unwrap();
        assert_eq!((reading.name, places.has(page)), (name, None));
        places.is_as_told(&reading);
        assert_eq!(places.has(page), Some(name));
        // It was something else once. A second read that matches says nothing about the first.
        places.begin_to_read(page).unwrap();
        let again = places.begin_to_read(page).unwrap();
        places.is_as_told(&again);
        assert_eq!(places.has(page), None);
    }
}
