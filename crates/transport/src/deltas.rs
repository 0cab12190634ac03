//! What the destination has of pages, so that one that is sent again can go as what has
//! changed of it.
//!
//! The content itself is not kept. Of each part of a page a fingerprint is, with a key
//! that no guest knows: a part with the same one as before has not changed. So a page costs
//! a sixteenth of its size here, however often it is rewritten.
//!
//! A version can be a base once the destination has acknowledged it, and as long as no
//! newer one has left, by any lane and in any form: then it is what the destination has.
//! QEMU's channels are not read in step, so an older version may come to the lanes after a
//! newer one. It does not leave any more: the destination has no use for it, and a delta
//! that is under way needs the base that is there.

mod comparing;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use bytemuck::allocation::try_zeroed_slice_box;
use page::{Batch, BlockId, Epoch, Fill, PAGE_BYTES, PART_BYTES, PARTS, PageIndex};
use parking_lot::Mutex;
use twox_hash::XxHash3_64;
use wire::{Announced, FILLS_MAX};

use comparing::Bases;
pub(crate) use comparing::Comparing;

/// What records take is this share of the VM's RAM, within these bounds: with a record a
/// page takes a fifteenth, so a fourth of a large VM has one, what was sent again of late.
const RECORDS_SHARE: u64 = 64;
const RECORDS_MIN_BYTES: u64 = 64 << 20;
const RECORDS_MAX_BYTES: u64 = 1 << 30;

/// Beside a record's place: the page has left twice in the newest epoch, as QEMU before 9.0
/// may have it, or because its lane died. Which of both is the destination's last can't be
/// known, so neither is a base.
const TWICE: u32 = 1 << 31;

/// Of each part of a page.
type Fingerprints = [u64; PARTS];

/// What the destination has of the pages of one VM.
pub struct Deltas {
    key: u64,
    /// Whether it is noted what pages contain that have no base.
    notes: AtomicBool,
    pages: AtomicU64,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    blocks: Vec<Block>,
    records: Vec<Record>,
    records_max: usize,
    /// Where the next record is looked for that can be given to another page.
    hand: usize,
}

/// Its tables have an entry for each page. They are zero, and no memory, until used; empty
/// where there is no room for them, and then its pages go whole.
struct Block {
    name: String,
    /// The destination can read what it has of it.
    has_bases: bool,
    /// The newest version that has left.
    newest: Box<[u32]>,
    /// One more than the record's place, or 0: none; and [`TWICE`].
    record: Box<[u32]>,
}

/// What a version of a page contains.
struct Record {
    block: BlockId,
    page: u32,
    epoch: Epoch,
    is_placed: bool,
    /// It was a base since the hand last passed.
    was_used: bool,
    fingerprints: Fingerprints,
}

impl std::fmt::Debug for Deltas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is nobody's business.
        f.debug_struct("Deltas").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl Default for Deltas {
    fn default() -> Self {
        Self {
            key: RandomState::new().hash_one(0),
            notes: AtomicBool::new(false),
            pages: AtomicU64::new(0),
            known: Mutex::default(),
        }
    }
}

impl Deltas {
    /// Deltas are sent if they are at most this share of a batch's bodies: they have to be
    /// put together here, and onto their bases there.
    pub const WORTH: f64 = 0.75;

    /// So many pages of a VM can have a base, of those that were sent again of late.
    #[must_use]
    pub fn pages_max(ram_bytes: u64) -> u64 {
        let bytes = (ram_bytes / RECORDS_SHARE).clamp(RECORDS_MIN_BYTES, RECORDS_MAX_BYTES);
        bytes / size_of::<Record>() as u64
    }

    /// The block list is known; nothing has left yet.
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

    /// The destination can make pages of these blocks from deltas.
    pub fn take_for(&self, names: &[String]) {
        for block in &mut self.known.lock().blocks {
            block.has_bases = names.contains(&block.name);
        }
    }

    /// Whether pages that have no base yet are worth being one: not while the CPU is what a
    /// migration waits for.
    pub fn note_pages(&self, notes: bool) {
        self.notes.store(notes, Relaxed);
    }

    /// Pages that went as deltas.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// A lane has taken this batch: whatever becomes of its pages, what the destination had
    /// of them until now is not what it will have. Takes out those of which a newer version
    /// has left, and says how many bodies those are.
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

    /// These bodies are about to be sent by a lane, and contain that.
    fn note(&self, batch: &Batch, fingerprints: &[Fingerprints]) {
        let mut known = self.known.lock();
        for (body, fingerprints) in batch.bodies().iter().zip(fingerprints) {
            known.note(batch.block, body.page.0, batch.epoch, fingerprints);
        }
    }

    /// The destination has placed a batch that was sent as bodies or deltas.
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

    /// Of each part of a page.
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

    /// A version of a page leaves. Which one did before, and whether that was there twice;
    /// none if there is no such page, or a newer one has left.
    fn leaves(&mut self, page: usize, epoch: Epoch) -> Option<(Epoch, bool)> {
        let newest = self.newest.get_mut(page).filter(|newest| **newest <= epoch.0)?;
        let before = std::mem::replace(newest, epoch.0);
        let record = self.record.get_mut(page)?;
        let was_twice = *record & TWICE != 0;
        // Most pages leave once, and the table is no memory until it is written to.
        if before == epoch.0 {
            *record |= TWICE;
        } else if was_twice {
            *record &= !TWICE;
        }
        Some((Epoch(before), was_twice))
    }

    /// Takes out of a batch what is older than what has left.
    fn drop_older(&self, batch: &mut Batch) -> usize {
        let epoch = batch.epoch.0;
        let is_older = |newest: &u32| *newest > epoch;
        let has_older = |fill: &Fill| {
            self.newest.get(run(fill)).is_some_and(|newest| newest.iter().any(is_older))
        };
        let is_newest = |page: PageIndex| !self.newest.get(page.0 as usize).is_some_and(is_older);
        if batch.fills().iter().any(has_older) {
            let left: usize = batch.fills().iter().map(|fill| runs_left(fill, is_newest)).sum();
            // What is too much for one batch's tables leaves whole: the destination drops
            // what is older by itself.
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

/// Both of a block's. None if there is no room for them: how large a block is QEMU says.
fn tables(pages: u64) -> Option<[Box<[u32]>; 2]> {
    let pages = usize::try_from(pages).ok()?;
    Some([try_zeroed_slice_box(pages).ok()?, try_zeroed_slice_box(pages).ok()?])
}

/// Runs that a run becomes if only such pages are left of it.
fn runs_left(fill: &Fill, is_left: impl Fn(PageIndex) -> bool) -> usize {
    let mut goes_on = false;
    let pages = (fill.first.0..).take(fill.count as usize).map(PageIndex);
    let begins = |page| {
        let was_left = std::mem::replace(&mut goes_on, is_left(page));
        goes_on && !was_left
    };
    pages.map(begins).filter(|begins| *begins).count()
}

/// The places of a run's pages.
fn run(fill: &Fill) -> std::ops::Range<usize> {
    let first = fill.first.0 as usize;
    first..first.saturating_add(fill.count as usize)
}

impl Known {
    fn note(&mut self, block: BlockId, page: u32, epoch: Epoch, fingerprints: &Fingerprints) {
        let Some(of) = self.blocks.get(usize::from(block.0)) else { return };
        // A newer one may have left meanwhile, or the same one twice.
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

    /// A record's place that is new, or of a page that was not sent again for long.
    fn new_place(&mut self) -> usize {
        if self.records.len() < self.records_max {
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
}
