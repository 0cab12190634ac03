//! One end's entries, and their sums.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytemuck::allocation::try_zeroed_slice_box;
use page::{Batch, BlockId, Body, Epoch, PAGE_BYTES, PageIndex};

use crate::entry::{Delivery, Entry};
use crate::fingerprint::Fingerprint;
use crate::hash::Hash;

/// Pages in a range: 16 MiB of RAM, 32 KiB of entries.
pub const RANGE_PAGES: usize = 4096;

/// One end's entries for all pages of a VM. Any number of threads write it; what is read is
/// consistent once they have ended.
#[derive(Debug)]
pub struct Ledger {
    blocks: Vec<BlockLedger>,
}

/// The entries and digests of one RAM block.
#[derive(Debug)]
pub struct BlockLedger {
    hash: Hash,
    entries: Box<[AtomicU64]>,
    digests: Box<[AtomicU64]>,
}

impl Ledger {
    /// A ledger for blocks with these numbers of pages; none if there is no memory for it.
    pub fn new(hash: Hash, pages: impl IntoIterator<Item = u64>) -> Option<Self> {
        let block = |pages| BlockLedger::new(hash, pages);
        let blocks = pages.into_iter().map(block).collect::<Option<_>>()?;
        Some(Self { blocks })
    }

    /// The ledger of one block.
    #[must_use]
    pub fn block(&self, block: BlockId) -> Option<&BlockLedger> {
        self.blocks.get(usize::from(block.0))
    }

    /// The blocks, in their order.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, &BlockLedger)> {
        (0..).map(BlockId).zip(&self.blocks)
    }

    /// The total of each block: the sum of its digests.
    #[must_use]
    pub fn totals(&self) -> Vec<u64> {
        let total = |block: &BlockLedger| {
            block.digests.iter().fold(0_u64, |sum, digest| sum.wrapping_add(digest.load(Relaxed)))
        };
        self.blocks.iter().map(total).collect()
    }

    /// How many pages it has entries for.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.entries.len() as u64).sum()
    }

    /// Records bodies of a batch that QEMU hands over at the source in this epoch.
    pub fn bodies_handed_over(&self, batch: &Batch, bodies: &[Body], epoch: Epoch) {
        let Some(block) = self.block(batch.block) else { return };
        let mut writing = block.write();
        for &body in bodies {
            let fingerprint = block.hash.of(batch.bytes_of(body));
            writing.handed_over(body.page, fingerprint, epoch);
        }
    }

    /// Records the fills of a batch that QEMU hands over at the source in this epoch.
    pub fn fills_handed_over(&self, batch: &Batch, epoch: Epoch) {
        let Some(block) = self.block(batch.block) else { return };
        let mut writing = block.write();
        for fill in batch.fills() {
            let fingerprint = block.hash.of_fill(fill.byte);
            for page in (fill.first.0..).take(fill.count as usize) {
                writing.handed_over(PageIndex(page), fingerprint, epoch);
            }
        }
    }
}

impl BlockLedger {
    fn new(hash: Hash, pages: u64) -> Option<Self> {
        let entries = usize::try_from(pages).ok()?;
        Some(Self {
            hash,
            entries: try_zeroed_slice_box(entries).ok()?,
            digests: try_zeroed_slice_box(entries.div_ceil(RANGE_PAGES)).ok()?,
        })
    }

    /// The hash that makes its fingerprints.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// Writes entries of pages that are near each other.
    pub fn write(&self) -> Writing<'_> {
        Writing { block: self, range: 0, change: 0 }
    }

    /// Marks a page that the source left out after it was handed over, because the guest had
    /// changed it: QEMU hands it over again.
    pub fn left_out(&self, page: PageIndex, epoch: Epoch) {
        let Some(place) = self.entries.get(page.0 as usize) else { return };
        let marked = |before: u64| {
            let (before, this) = (Entry(before), Entry::handed_over(Fingerprint(0), epoch));
            (before.is_known() && before.epoch() == this.epoch()).then_some(before.left_out().0)
        };
        // If the entry is newer by now, it needs no mark.
        let _ = place.fetch_update(Relaxed, Relaxed, marked);
    }

    /// The digests of its ranges.
    pub fn digests(&self) -> impl ExactSizeIterator<Item = u64> {
        self.digests.iter().map(|digest| digest.load(Relaxed))
    }

    /// The entries of a range, as sent to the other end; none if there is no such range.
    #[must_use]
    pub fn entries(&self, range: u32) -> Option<Vec<u64>> {
        Some(self.range(range)?.map(|entry| entry.0).collect())
    }

    /// Pages for which `theirs`, the destination's entries of a range, differ from what QEMU handed
    /// over here. A page that QEMU never handed over may hold anything. One that was reread, or
    /// handed over twice in one epoch, with another content may hold either, and its entry has one
    /// fingerprint: it may hold anything that was placed there. None if there is no such range, or
    /// `theirs` has the wrong number of entries.
    #[must_use]
    pub fn differences(&self, range: u32, theirs: &[u64]) -> Option<Vec<crate::Difference>> {
        let ours = self.range(range)?;
        if ours.len() != theirs.len() {
            return None;
        }
        let first = range * u32::try_from(RANGE_PAGES).ok()?;
        let pages = (first..).map(PageIndex).zip(ours.zip(theirs));
        let differs = |(page, (ours, theirs)): (PageIndex, (Entry, &u64))| {
            let theirs = Entry(*theirs);
            let is_right = !ours.is_known()
                || ours.fingerprint() == theirs.fingerprint()
                || ours.is_either() && theirs.is_known();
            (!is_right).then(|| crate::Difference::new(page, ours, theirs))
        };
        Some(pages.filter_map(differs).collect())
    }

    /// Those pages from `first` on that don't hold what was placed there last. `bytes` is what was
    /// read back.
    pub fn not_as_placed(&self, first: PageIndex, bytes: &[u8]) -> Vec<PageIndex> {
        let pages = (first.0..).map(PageIndex).zip(bytes.chunks_exact(PAGE_BYTES));
        let is_wrong = |(page, bytes): &(PageIndex, &[u8])| {
            let entry = self.entry(*page);
            entry.is_known() && entry.fingerprint() != self.hash.of(bytes)
        };
        pages.filter(is_wrong).map(|(page, _)| page).collect()
    }

    /// Whether anything but zeros was placed there last.
    #[must_use]
    pub fn holds_data(&self, page: PageIndex) -> bool {
        let entry = self.entry(page);
        entry.is_known() && entry.fingerprint() != self.hash.of_fill(0)
    }

    pub(crate) fn entry(&self, page: PageIndex) -> Entry {
        Entry(self.entries.get(page.0 as usize).map_or(0, |entry| entry.load(Relaxed)))
    }

    fn range(&self, range: u32) -> Option<impl ExactSizeIterator<Item = Entry>> {
        let first = usize::try_from(range).ok()?.checked_mul(RANGE_PAGES)?;
        let end = first.saturating_add(RANGE_PAGES).min(self.entries.len());
        let entries = self.entries.get(first..end).filter(|entries| !entries.is_empty())?;
        Some(entries.iter().map(|entry| Entry(entry.load(Relaxed))))
    }
}

/// Writes entries, and updates the digest of their range once for all of them.
#[derive(Debug)]
pub struct Writing<'l> {
    block: &'l BlockLedger,
    range: usize,
    change: u64,
}

impl Writing<'_> {
    /// At the source. Several threads call this, and one of them may be an epoch behind.
    pub fn handed_over(&mut self, page: PageIndex, fingerprint: Fingerprint, epoch: Epoch) {
        let entry = Entry::handed_over(fingerprint, epoch);
        let Some(place) = self.block.entries.get(page.0 as usize) else { return };
        let newer = |before: u64| Some(entry.after(Entry(before))?.0);
        if let Ok(before) = place.fetch_update(Relaxed, Relaxed, newer) {
            self.changed(page, Entry(before), entry);
        }
    }

    /// At the source: replaces the entry `noted` with what was reread, unless QEMU has handed the
    /// page over again.
    pub(crate) fn reread(&mut self, page: PageIndex, noted: Entry, fingerprint: Fingerprint) {
        let Some(place) = self.block.entries.get(page.0 as usize) else { return };
        let now = noted.reread(fingerprint);
        if place.compare_exchange(noted.0, now.0, Relaxed, Relaxed).is_ok() {
            self.changed(page, noted, now);
        }
    }

    /// At the destination, with the page's range locked.
    pub fn placed(
        &mut self,
        page: PageIndex,
        fingerprint: Fingerprint,
        epoch: Epoch,
        delivery: Delivery,
    ) {
        let entry = Entry::placed(fingerprint, epoch, delivery);
        let Some(place) = self.block.entries.get(page.0 as usize) else { return };
        let before = Entry(place.load(Relaxed));
        place.store(entry.0, Relaxed);
        self.changed(page, before, entry);
    }

    fn changed(&mut self, page: PageIndex, before: Entry, now: Entry) {
        let range = page.0 as usize / RANGE_PAGES;
        if range != self.range {
            self.flush();
            self.range = range;
        }
        let mixed = |entry: Entry| entry.fingerprint().mixed(page.0);
        self.change = self.change.wrapping_add(mixed(now)).wrapping_sub(mixed(before));
    }

    fn flush(&mut self) {
        let change = std::mem::take(&mut self.change);
        if let Some(digest) = self.block.digests.get(self.range)
            && change != 0
        {
            digest.fetch_add(change, Relaxed);
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ledger(pages: impl IntoIterator<Item = u64>) -> Ledger {
        Ledger::new(Hash::default(), pages).unwrap()
    }

    fn print(content: u32) -> Fingerprint {
        Hash::default().of(&content.to_le_bytes())
    }

    #[test]
    fn an_older_epoch_that_comes_late_changes_nothing() {
        let ledger = ledger([10]);
        let block = ledger.block(BlockId(0)).unwrap();
        block.write().handed_over(PageIndex(3), print(1), Epoch(7));
        let before = ledger.totals();
        block.write().handed_over(PageIndex(3), print(2), Epoch(6));
        assert_eq!(ledger.totals(), before);
        block.write().handed_over(PageIndex(3), print(2), Epoch(7));
        assert_ne!(ledger.totals(), before);
    }

    /// A balloon may have returned the page in between, and then QEMU doesn't hand it over again.
    #[test]
    fn of_two_contents_in_one_epoch_the_destination_may_hold_either() {
        let source = ledger([10]);
        let (page, ours) = (PageIndex(3), source.block(BlockId(0)).unwrap());
        let hand_over = |content, epoch| {
            ours.write().handed_over(page, print(content), Epoch(epoch));
        };
        let is_right = |content| {
            let destination = ledger([10]);
            let theirs = destination.block(BlockId(0)).unwrap();
            theirs.write().placed(page, print(content), Epoch(2), Delivery::Body);
            ours.differences(0, &theirs.entries(0).unwrap()).unwrap().is_empty()
        };
        hand_over(1, 2);
        hand_over(1, 2);
        assert!(is_right(1) && !is_right(2), "the same content twice");
        for _ in 0..2 {
            hand_over(2, 2);
            assert!(is_right(1) && is_right(2));
        }
        hand_over(2, 3);
        assert!(!is_right(1) && is_right(2), "a newer epoch");
        // The older one is noted last, and the destination keeps the newer.
        hand_over(1, u32::MAX);
        hand_over(2, u32::MAX - 1);
        assert!(is_right(1) && is_right(2), "epochs that are not distinguished");
    }

    #[test]
    fn content_in_another_place_is_another_sum() {
        let total = |places: [(u32, u32); 2]| {
            let ledger = ledger([9000]);
            for (page, content) in places {
                let block = ledger.block(BlockId(0)).unwrap();
                block.write().handed_over(PageIndex(page), print(content), Epoch(1));
            }
            ledger.totals()
        };
        assert_eq!(total([(1, 5), (8000, 6)]), total([(8000, 6), (1, 5)]));
        assert_ne!(total([(1, 5), (2, 6)]), total([(1, 6), (2, 5)]));
        assert_ne!(total([(1, 5), (8000, 6)]), total([(1, 6), (8000, 5)]));
    }

    #[test]
    fn pages_and_blocks_that_are_not_there_are_passed_by() {
        let ledger = ledger([5, 0]);
        assert!(ledger.block(BlockId(2)).is_none());
        let block = ledger.block(BlockId(0)).unwrap();
        block.write().handed_over(PageIndex(5), print(1), Epoch(1));
        block.left_out(PageIndex(u32::MAX), Epoch(1));
        assert_eq!((ledger.totals(), ledger.pages()), (vec![0, 0], 5));
        assert_eq!((block.entries(0).unwrap().len(), block.entries(1)), (5, None));
        assert!(block.differences(0, &[0; 4]).is_none());
        assert!(block.differences(u32::MAX, &[]).is_none());
    }

    const THREE_RANGES: u32 = 3 * 4096;

    proptest! {
        /// Both ends note the same pages in different orders. The pages that differ in the end are
        /// found, and no others.
        #[test]
        fn what_differs_is_what_is_found(
            pages in prop::collection::vec((0..THREE_RANGES, 0..4_u32), 1..60),
            wrong in prop::collection::btree_set(0..THREE_RANGES, 0..5),
        ) {
            let count = u64::from(THREE_RANGES);
            let (source, destination) = (ledger([count]), ledger([count]));
            let (ours, theirs) =
                (source.block(BlockId(0)).unwrap(), destination.block(BlockId(0)).unwrap());
            let mut last = std::collections::BTreeMap::new();
            for (epoch, (page, content)) in (1..).map(Epoch).zip(&pages) {
                ours.write().handed_over(PageIndex(*page), print(*content), epoch);
                last.insert(*page, (*content, epoch));
            }
            let mut expected = Vec::new();
            let mut writing = theirs.write();
            for (page, (content, epoch)) in last.iter().rev() {
                let placed = if wrong.contains(page) { content + 100 } else { *content };
                writing.placed(PageIndex(*page), print(placed), *epoch, Delivery::Body);
                if wrong.contains(page) {
                    expected.push(*page);
                }
            }
            drop(writing);
            expected.reverse();
            prop_assert_eq!(source.totals() == destination.totals(), expected.is_empty());
            let digests = ours.digests().zip(theirs.digests());
            let differing = (0_u32..).zip(digests).filter(|(_, (ours, theirs))| ours != theirs);
            let found: Vec<u32> = differing
                .flat_map(|(range, _)| {
                    ours.differences(range, &theirs.entries(range).unwrap()).unwrap()
                })
                .map(|difference| difference.page.0)
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}
