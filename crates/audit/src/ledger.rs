//! One end's entries, and their sums.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytemuck::allocation::try_zeroed_slice_box;
use page::{Batch, BlockId, Body, Epoch, PAGE_BYTES, PageIndex};

use crate::entry::{Delivery, Entry};
use crate::fingerprint::Fingerprint;
use crate::hash::Hash;
use crate::numbering::Numbering;

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
    /// Of all blocks. A destination's ledger has none of its own.
    numbering: Arc<Numbering>,
    entries: Box<[AtomicU64]>,
    digests: Box<[AtomicU64]>,
}

/// A range of the source's ledger, compared with the destination's.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RangeComparison {
    /// Pages that are not as QEMU handed them over.
    pub differences: Vec<crate::Difference>,
    /// Pages that hold something else than what was handed over last, and are accepted, because the
    /// source can't know which of two contents the destination holds.
    pub unproved_pages: u64,
}

impl Ledger {
    /// A ledger for blocks with these numbers of pages; none if there is no memory for it.
    pub fn new(hash: Hash, pages: impl IntoIterator<Item = u64>) -> Option<Self> {
        let numbering = Arc::default();
        let block = |pages| BlockLedger::new(hash, &numbering, pages);
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
    fn new(hash: Hash, numbering: &Arc<Numbering>, pages: u64) -> Option<Self> {
        let entries = usize::try_from(pages).ok()?;
        Some(Self {
            hash,
            numbering: Arc::clone(numbering),
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
        Writing { block: self, numbered: None, range: 0, change: 0 }
    }

    /// Marks pages that the source left out after they were handed over in that epoch, because the
    /// guest had changed them: QEMU hands them over again.
    pub fn left_out(&self, epoch: Epoch) -> impl Fn(PageIndex) {
        // Pages of an epoch that is forgotten have come again since.
        let number = self.numbering.find(epoch);
        move |page| {
            let (Some(place), Some(number)) = (self.entries.get(page.0 as usize), number) else {
                return;
            };
            let marked = |before: u64| {
                let (before, this) = (Entry(before), Entry::handed_over(Fingerprint(0), number));
                let is_it = before.is_known() && before.number() == this.number();
                is_it.then_some(before.left_out().0)
            };
            // If the entry is newer by now, it needs no mark.
            let _ = place.fetch_update(Relaxed, Relaxed, marked);
        }
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

    /// Compares `theirs`, the destination's entries of a range, with what QEMU handed over here. A
    /// page that QEMU never handed over may hold anything. One that was reread, or handed over twice
    /// in one epoch, with another content may hold either, and its entry has one fingerprint: it may
    /// hold anything that was placed there. None if there is no such range, or `theirs` has the
    /// wrong number of entries.
    #[must_use]
    pub fn compare(&self, range: u32, theirs: &[u64]) -> Option<RangeComparison> {
        let ours = self.range(range)?;
        if ours.len() != theirs.len() {
            return None;
        }
        let first = range * u32::try_from(RANGE_PAGES).ok()?;
        let pages = (first..).map(PageIndex).zip(ours.zip(theirs));
        let mut compared = RangeComparison::default();
        for (page, (ours, theirs)) in pages {
            let theirs = Entry(*theirs);
            if !ours.is_known() || ours.fingerprint() == theirs.fingerprint() {
                continue;
            }
            if ours.is_either() && theirs.is_known() {
                compared.unproved_pages += 1;
                continue;
            }
            let epoch = self.numbering.epoch(ours.number());
            compared.differences.push(crate::Difference::new(page, epoch, ours, theirs));
        }
        Some(compared)
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
    /// The last epoch and its number.
    numbered: Option<(Epoch, u32)>,
    range: usize,
    change: u64,
}

impl Writing<'_> {
    /// At the source. Several threads call this, and one of them may be an epoch behind.
    pub fn handed_over(&mut self, page: PageIndex, fingerprint: Fingerprint, epoch: Epoch) {
        let entry = Entry::handed_over(fingerprint, self.number(epoch));
        let Some(place) = self.block.entries.get(page.0 as usize) else { return };
        let newer = |before: u64| Some(entry.after(Entry(before))?.0);
        if let Ok(before) = place.fetch_update(Relaxed, Relaxed, newer) {
            self.changed(page, Entry(before), entry);
        }
    }

    fn number(&mut self, epoch: Epoch) -> u32 {
        let known = self.numbered.filter(|(of, _)| *of == epoch);
        let (_, number) = known.unwrap_or_else(|| (epoch, self.block.numbering.of(epoch)));
        self.numbered = Some((epoch, number));
        number
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
mod tests;
