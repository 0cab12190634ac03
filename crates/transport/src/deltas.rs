//! Tracks the destination's versions of pages, so that a page that is sent again can go as
//! a delta.
//!
//! The content itself is not kept, only a fingerprint of each part of a page, with a key
//! that no guest knows: a part with the same fingerprint as before has not changed. So a
//! page costs a sixteenth of its size here, however often it is rewritten.
//!
//! A version can be a base once the destination has acknowledged it, and as long as no
//! newer one has left, on any lane and in any form: until then it is the destination's
//! content. QEMU's channels are not read in step, so an older version may reach the lanes
//! after a newer one. It is then dropped: the destination has no use for it, and a delta in
//! flight needs its base to stay in place.

mod comparing;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use bytemuck::allocation::try_zeroed_slice_box;
use page::{
    Batch, BlockId, Borrowed, Epoch, Fill, PAGE_BYTES, PART_BYTES, PARTS, PageIndex, Reserve,
};
use parking_lot::Mutex;
use twox_hash::XxHash3_64;
use wire::{Announced, FILLS_MAX};

use comparing::Bases;
pub(crate) use comparing::Comparing;

/// Records take this fraction of the VM's RAM (1/64), within these bounds. A record takes a
/// fifteenth of a page, so a quarter of a large VM's pages can have one: those sent again
/// most recently.
const RECORDS_SHARE: u64 = 64;
const RECORDS_MIN_BYTES: u64 = 64 << 20;
const RECORDS_MAX_BYTES: u64 = 1 << 30;
/// What each VM has for records by itself, about as much as its smallest part of the pool. The
/// rest is borrowed in steps of this size.
const RECORDS_OWN_BYTES: usize = 2 << 20;

/// A flag next to a record's place: the page has left twice in the newest epoch, because
/// QEMU before 9.0 may send it twice or because its lane died. Which of the two the
/// destination placed last is unknown, so neither is a base.
const TWICE: u32 = 1 << 31;

/// A fingerprint of each part of a page.
type Fingerprints = [u64; PARTS];

/// The destination's versions of one VM's pages.
pub struct Deltas {
    key: u64,
    /// Whether pages without a base are noted, too.
    notes: AtomicBool,
    pages: AtomicU64,
    known: Mutex<Known>,
}

struct Known {
    blocks: Vec<Block>,
    // Freed before others are promised its memory.
    records: Vec<Record>,
    records_max: usize,
    /// For records. All that leave share it: a VM that gets no more has fewer.
    memory: Borrowed,
    /// Where the search for a record to reuse continues.
    hand: usize,
}

/// The tables have an entry per page. They are zero, and take no memory, until used. They
/// are empty if memory can't be reserved for them; the block's pages then go whole.
struct Block {
    name: String,
    /// The destination can read its own memory of the block.
    has_bases: bool,
    /// The newest version that has left.
    newest: Box<[u32]>,
    /// The record's place plus one, or 0 for none; and [`TWICE`].
    record: Box<[u32]>,
}

/// The content of a page's version.
struct Record {
    block: BlockId,
    page: u32,
    epoch: Epoch,
    is_placed: bool,
    /// It was used as a base since the hand last passed.
    was_used: bool,
    fingerprints: Fingerprints,
}

impl std::fmt::Debug for Deltas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must stay secret.
        f.debug_struct("Deltas").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl Deltas {
    /// The most memory for records of all VMs together, beyond what each has by itself: as much as
    /// the largest VM alone may have, and as many small ones as a gang moves at a time.
    pub const ALL_BYTES_MAX: usize = 1 << 30;

    /// Deltas are sent if they are at most this fraction of a batch's bodies, because
    /// making and applying them costs time at both ends.
    pub const WORTH: f64 = 0.75;

    /// Those of a VM, with records in this reserve.
    #[must_use]
    pub fn new(reserve: &Arc<Reserve>) -> Self {
        let known = Known {
            blocks: Vec::new(),
            records: Vec::new(),
            records_max: 0,
            memory: Borrowed::new(reserve, RECORDS_OWN_BYTES),
            hand: 0,
        };
        Self {
            key: RandomState::new().hash_one(0),
            notes: AtomicBool::new(false),
            pages: AtomicU64::new(0),
            known: Mutex::new(known),
        }
    }

    /// The number of a VM's pages that can have a base: those sent again most recently.
    #[must_use]
    pub fn pages_max(ram_bytes: u64) -> u64 {
        let bytes = (ram_bytes / RECORDS_SHARE).clamp(RECORDS_MIN_BYTES, RECORDS_MAX_BYTES);
        bytes / size_of::<Record>() as u64
    }

    /// Sets the block list, before anything has left.
    pub fn announce(&self, blocks: &[Announced]) {
        let block = |block: &Announced| {
            let [newest, record] = tables(block.bytes / PAGE_BYTES as u64).unwrap_or_default();
            Block { name: block.name.clone(), has_bases: false, newest, record }
        };
        let bytes = blocks.iter().fold(0_u64, |sum, block| sum.saturating_add(block.bytes));
        let mut known = self.known.lock();
        known.blocks = blocks.iter().map(block).collect();
        known.records_max = usize::try_from(Self::pages_max(bytes)).unwrap_or(usize::MAX);
    }

    /// Sets the blocks whose pages the destination can make from deltas.
    pub fn take_for(&self, names: &[String]) {
        for block in &mut self.known.lock().blocks {
            block.has_bases = names.contains(&block.name);
        }
    }

    /// Sets whether pages without a base are noted to become one: not while the CPU is the
    /// migration's bottleneck.
    pub fn note_pages(&self, notes: bool) {
        self.notes.store(notes, Relaxed);
    }

    /// Pages that were sent as deltas.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Notes that a lane has taken this batch, so the destination's current versions of its
    /// pages will be replaced. Removes pages of which a newer version has left, and returns
    /// how many bodies it removed.
    fn leave(&self, batch: &mut Batch, bases: &mut Bases) -> usize {
        bases.begin(batch);
        let mut known = self.known.lock();
        let Known { blocks, records, .. } = &mut *known;
        let Some(block) = blocks.get_mut(usize::from(batch.block.0)) else { return 0 };
        let dropped = block.drop_older(batch);
        for fill in batch.fills() {
            let pages = block.newest.len();
            for page in run(fill).take_while(|page| *page < pages) {
                block.leaves(page, batch.epoch);
            }
        }
        for body in batch.bodies() {
            let page = body.page.0 as usize;
            let Some((before, was_twice)) = block.leaves(page, batch.epoch) else { continue };
            let Some(record) = block.place(page).map(|place| &mut records[place]) else { continue };
            let is_there = record.is_placed && record.epoch == before && !was_twice;
            if block.has_bases && is_there && record.epoch < batch.epoch {
                record.was_used = true;
                bases.add(body.page, record.epoch, &record.fingerprints);
            }
        }
        dropped
    }

    /// Notes the content of bodies that a lane is about to send.
    fn note(&self, batch: &Batch, fingerprints: &[Fingerprints]) {
        let mut known = self.known.lock();
        for (body, fingerprints) in batch.bodies().iter().zip(fingerprints) {
            known.note(batch.block, body.page.0, batch.epoch, fingerprints);
        }
    }

    /// Notes that the destination has placed a batch that was sent as bodies or deltas.
    pub(crate) fn placed(&self, batch: &Batch) {
        let mut known = self.known.lock();
        let Known { blocks, records, .. } = &mut *known;
        let Some(block) = blocks.get(usize::from(batch.block.0)) else { return };
        for body in batch.bodies() {
            if let Some(record) = block.place(body.page.0 as usize).map(|at| &mut records[at]) {
                record.is_placed |= record.epoch == batch.epoch;
            }
        }
    }

    /// The fingerprint of each part of a page.
    fn fingerprints(&self, page: &[u8]) -> Fingerprints {
        let mut each = [0; PARTS];
        for (fingerprint, part) in each.iter_mut().zip(page.chunks_exact(PART_BYTES)) {
            *fingerprint = XxHash3_64::oneshot_with_seed(self.key, part);
        }
        each
    }
}

impl Block {
    /// The place of a page's record.
    fn place(&self, page: usize) -> Option<usize> {
        ((*self.record.get(page)? & !TWICE) as usize).checked_sub(1)
    }

    /// Notes that a version of a page leaves. Returns the version that left before, and
    /// whether that one left twice; none if there is no such page, or a newer version has
    /// left.
    fn leaves(&mut self, page: usize, epoch: Epoch) -> Option<(Epoch, bool)> {
        let newest = self.newest.get_mut(page).filter(|newest| **newest <= epoch.0)?;
        let before = std::mem::replace(newest, epoch.0);
        let record = self.record.get_mut(page)?;
        let was_twice = *record & TWICE != 0;
        // Most pages leave once, and the table takes no memory until it is written.
        if before == epoch.0 {
            *record |= TWICE;
        } else if was_twice {
            *record &= !TWICE;
        }
        Some((Epoch(before), was_twice))
    }

    /// Removes pages from a batch of which a newer version has left.
    fn drop_older(&self, batch: &mut Batch) -> usize {
        let epoch = batch.epoch.0;
        let is_older = |newest: &u32| *newest > epoch;
        let has_older = |fill: &Fill| {
            self.newest.get(run(fill)).is_some_and(|newest| newest.iter().any(is_older))
        };
        let is_newest = |page: PageIndex| !self.newest.get(page.0 as usize).is_some_and(is_older);
        if batch.fills().iter().any(has_older) {
            let left: usize = batch.fills().iter().map(|fill| runs_left(fill, is_newest)).sum();
            // If the rest would not fit one batch's tables, all of it leaves: the
            // destination drops older versions itself.
            if left <= FILLS_MAX {
                batch.retain_fills(is_newest);
            }
        }
        if batch.bodies().iter().all(|body| is_newest(body.page)) {
            return 0;
        }
        let pages: Vec<PageIndex> = batch.bodies().iter().map(|body| body.page).collect();
        batch.retain_bodies(|nth, _| is_newest(pages[nth]))
    }
}

/// Both tables of a block. None if memory can't be reserved: QEMU dictates a block's size.
fn tables(pages: u64) -> Option<[Box<[u32]>; 2]> {
    let pages = usize::try_from(pages).ok()?;
    Some([try_zeroed_slice_box(pages).ok()?, try_zeroed_slice_box(pages).ok()?])
}

/// The number of runs that remain of a run if only the pages with `is_left` stay.
fn runs_left(fill: &Fill, is_left: impl Fn(PageIndex) -> bool) -> usize {
    let mut goes_on = false;
    let pages = (fill.first.0..).take(fill.count as usize).map(PageIndex);
    let begins = |page| {
        let was_left = std::mem::replace(&mut goes_on, is_left(page));
        goes_on && !was_left
    };
    pages.map(begins).filter(|begins| *begins).count()
}

/// The indices of a run's pages.
fn run(fill: &Fill) -> std::ops::Range<usize> {
    let first = fill.first.0 as usize;
    first..first.saturating_add(fill.count as usize)
}

impl Known {
    fn note(&mut self, block: BlockId, page: u32, epoch: Epoch, fingerprints: &Fingerprints) {
        let Some(of) = self.blocks.get(usize::from(block.0)) else { return };
        // A newer version may have left meanwhile, or the same one twice.
        if !of.has_bases
            || of.newest.get(page as usize) != Some(&epoch.0)
            || of.record[page as usize] & TWICE != 0
        {
            return;
        }
        let place = of.place(page as usize).unwrap_or_else(|| self.new_place());
        let fingerprints = *fingerprints;
        let was_used = self
            .records
            .get(place)
            .is_some_and(|record| (record.block, record.page) == (block, page) && record.was_used);
        let record = Record { block, page, epoch, is_placed: false, was_used, fingerprints };
        match self.records.get_mut(place) {
            Some(known) => *known = record,
            None => self.records.push(record),
        }
        let number = u32::try_from(place + 1).expect("fewer records than that");
        self.blocks[usize::from(block.0)].record[page as usize] = number;
    }

    /// A new record's place, or that of a page that was not sent again for long.
    fn new_place(&mut self) -> usize {
        if self.has_room() {
            return self.records.len();
        }
        loop {
            self.hand = (self.hand + 1) % self.records.len();
            let record = &mut self.records[self.hand];
            if !std::mem::take(&mut record.was_used) {
                self.blocks[usize::from(record.block.0)].record[record.page as usize] &= TWICE;
                return self.hand;
            }
        }
    }

    /// Whether there is memory for one more record. While others have all of it, that is tried
    /// again once in each turn of the hand.
    fn has_room(&mut self) -> bool {
        let bytes = (self.records.len() + 1) * size_of::<Record>();
        let has_room = self.records.len() < self.records_max
            && (bytes <= self.memory.bytes()
                || self.hand == 0
                    && self.memory.grow_to(bytes.next_multiple_of(RECORDS_OWN_BYTES)));
        if has_room && self.records.len() == self.records.capacity() {
            // Left to itself it would double, beyond what is borrowed.
            let records = (self.memory.bytes() / size_of::<Record>()).min(self.records_max);
            self.records.reserve_exact(records - self.records.len());
        }
        has_room
    }
}
