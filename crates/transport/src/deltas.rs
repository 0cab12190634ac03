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

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use page::{Batch, BlockId, DeltaWriter, Epoch, Fill, PAGE_BYTES, PART_BYTES, PARTS, PageIndex};
use parking_lot::Mutex;
use twox_hash::XxHash3_64;
use wire::Announced;

/// Deltas are sent if they are at most this share of the bodies: they have to be put
/// together here, and onto their bases there.
const WORTH: f64 = 0.75;

/// What records take is this share of the VM's RAM, within these bounds: with a record a
/// page takes a fifteenth, so a fourth of a large VM has one, what was sent again of late.
const RECORDS_SHARE: u64 = 64;
const RECORDS_MIN_BYTES: u64 = 64 << 20;
const RECORDS_MAX_BYTES: u64 = 1 << 30;

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

/// Its tables have an entry for each page. They are zero, and no memory, until used.
struct Block {
    name: String,
    /// The destination can read what it has of it.
    has_bases: bool,
    /// The newest version that has left.
    newest: Vec<u32>,
    /// One more than the record's place; 0: none.
    record: Vec<u32>,
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
    /// The block list is known; nothing has left yet.
    pub fn announce(&self, blocks: &[Announced]) {
        let block = |block: &Announced| {
            let pages = usize::try_from(block.bytes / PAGE_BYTES as u64).unwrap_or(0);
            Block {
                name: block.name.clone(),
                has_bases: false,
                newest: vec![0; pages],
                record: vec![0; pages],
            }
        };
        let bytes: u64 = blocks.iter().map(|block| block.bytes).sum();
        let records_bytes = (bytes / RECORDS_SHARE).clamp(RECORDS_MIN_BYTES, RECORDS_MAX_BYTES);
        let mut known = self.known.lock();
        known.blocks = blocks.iter().map(block).collect();
        known.records_max =
            usize::try_from(records_bytes).unwrap_or(usize::MAX) / size_of::<Record>();
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
    pub(crate) fn leave(&self, batch: &mut Batch, bases: &mut Bases) -> usize {
        bases.begin(batch);
        let mut known = self.known.lock();
        let Known { blocks, records, .. } = &mut *known;
        let Some(block) = blocks.get_mut(usize::from(batch.block.0)) else { return 0 };
        let dropped = block.drop_older(batch);
        for fill in batch.fills() {
            for newest in block.newest.get_mut(run(fill)).into_iter().flatten() {
                *newest = batch.epoch.0;
            }
        }
        for body in batch.bodies() {
            let page = body.page.0 as usize;
            let Some(newest) = block.newest.get_mut(page) else { continue };
            let before = std::mem::replace(newest, batch.epoch.0);
            let record = (block.record[page] as usize).checked_sub(1);
            let Some(record) = record.map(|record| &mut records[record]) else { continue };
            let is_there = record.is_placed && record.epoch.0 == before;
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
            let record = block.record.get(body.page.0 as usize);
            let record = record.and_then(|record| (*record as usize).checked_sub(1));
            if let Some(record) = record.map(|record| &mut records[record]) {
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
    /// Takes out of a batch what is older than what has left.
    fn drop_older(&self, batch: &mut Batch) -> usize {
        let epoch = batch.epoch.0;
        let is_older = |newest: &u32| *newest > epoch;
        let has_older = |fill: &Fill| {
            self.newest.get(run(fill)).is_some_and(|newest| newest.iter().any(is_older))
        };
        let is_newest = |page: PageIndex| !self.newest.get(page.0 as usize).is_some_and(is_older);
        if batch.fills().iter().any(has_older) {
            batch.retain_fills(is_newest);
        }
        if batch.bodies().iter().all(|body| is_newest(body.page)) {
            return 0;
        }
        let pages: Vec<PageIndex> = batch.bodies().iter().map(|body| body.page).collect();
        batch.retain_bodies(|nth, _| is_newest(pages[nth]))
    }
}

/// The places of a run's pages.
fn run(fill: &Fill) -> std::ops::Range<usize> {
    let first = fill.first.0 as usize;
    first..first.saturating_add(fill.count as usize)
}

impl Known {
    fn note(&mut self, block: BlockId, page: u32, epoch: Epoch, fingerprints: &Fingerprints) {
        let Some(of) = self.blocks.get(usize::from(block.0)) else { return };
        // A newer one may have left meanwhile.
        if !of.has_bases || of.newest.get(page as usize) != Some(&epoch.0) {
            return;
        }
        let place = (of.record[page as usize] as usize).checked_sub(1);
        let place = place.unwrap_or_else(|| self.new_place());
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
                self.blocks[usize::from(record.block.0)].record[record.page as usize] = 0;
                return self.hand;
            }
        }
    }
}

/// What the destination has of the pages of one batch.
#[derive(Debug, Default)]
pub(crate) struct Bases {
    of: Option<(BlockId, Epoch)>,
    /// In the bodies' order, those that have one.
    pages: Vec<(PageIndex, Epoch)>,
    fingerprints: Vec<Fingerprints>,
}

impl Bases {
    fn begin(&mut self, batch: &Batch) {
        self.of = Some((batch.block, batch.epoch));
        self.pages.clear();
        self.fingerprints.clear();
    }

    fn add(&mut self, page: PageIndex, epoch: Epoch, fingerprints: &Fingerprints) {
        self.pages.push((page, epoch));
        self.fingerprints.push(*fingerprints);
    }

    /// Whether it says anything of this batch, from which pages may have been taken out.
    fn are_of(&self, batch: &Batch) -> bool {
        !self.pages.is_empty() && self.of == Some((batch.block, batch.epoch))
    }

    /// The base of a page, and which parts are other ones there. Pages are asked for in
    /// their batch's order; `next` is where to look.
    fn changed(
        &self,
        next: &mut usize,
        page: PageIndex,
        now: &Fingerprints,
    ) -> Option<(Epoch, u32)> {
        let found = self.pages[*next..].iter().position(|(known, _)| *known == page)?;
        let nth = *next + found;
        *next = nth + 1;
        let parts = self.fingerprints[nth].iter().zip(now).enumerate();
        let changed =
            parts.fold(0, |bits, (part, (before, now))| bits | u32::from(before != now) << part);
        Some((self.pages[nth].1, changed))
    }
}

/// One lane's use of what is known, with buffers that are used again.
#[derive(Debug, Default)]
pub(crate) struct Comparing {
    bases: Bases,
    now: Vec<Fingerprints>,
    writer: DeltaWriter,
}

impl Comparing {
    /// See [`Deltas::leave`].
    pub(crate) fn leave(&mut self, deltas: &Deltas, batch: &mut Batch) -> usize {
        deltas.leave(batch, &mut self.bases)
    }

    /// Notes what a batch's bodies contain, which are about to be sent. Its deltas, if
    /// those are less.
    pub(crate) fn compare(&mut self, deltas: &Deltas, batch: &Batch) -> Option<&[u8]> {
        let Self { bases, now, writer } = self;
        let bodies = batch.bodies();
        let has_bases = bases.are_of(batch);
        if bodies.is_empty() || !has_bases && !deltas.notes.load(Relaxed) {
            return None;
        }
        now.clear();
        now.extend(bodies.iter().map(|body| deltas.fingerprints(batch.bytes_of(*body))));
        deltas.note(batch, now);
        if !has_bases {
            return None;
        }
        writer.begin(bodies.len());
        let (mut next, mut count) = (0, 0);
        for (body, now) in bodies.iter().zip(&*now) {
            let base = bases.changed(&mut next, body.page, now);
            count += u64::from(base.is_some());
            writer.push(batch.bytes_of(*body), base);
        }
        let is_worth = writer.bytes().len() as f64 <= (bodies.len() * PAGE_BYTES) as f64 * WORTH;
        deltas.pages.fetch_add(if is_worth { count } else { 0 }, Relaxed);
        is_worth.then(|| writer.bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use page::{Deltas as Came, Pool, SLOT_BYTES};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Of a block that the destination can read, with noting on.
    fn deltas() -> Deltas {
        let deltas = Deltas::default();
        let block = |name: &str| Announced { name: name.to_owned(), bytes: 4 * MIB };
        deltas.announce(&[block("ram"), block("rom")]);
        deltas.take_for(&["ram".to_owned()]);
        deltas.note_pages(true);
        deltas
    }

    fn batch(pool: &Arc<Pool>, block: u16, epoch: u32, pages: &[(u32, u8)]) -> Batch {
        let mut batch = pool.take().unwrap();
        (batch.block, batch.epoch) = (BlockId(block), Epoch(epoch));
        for (nth, (page, byte)) in pages.iter().enumerate() {
            batch.buffer_mut()[nth * PAGE_BYTES..][..PAGE_BYTES].fill(1);
            batch.buffer_mut()[nth * PAGE_BYTES + 1000] = *byte;
            batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
        }
        batch
    }

    /// Takes and sends it as a lane does. The base of each page, if it goes as deltas.
    fn send(deltas: &Deltas, lane: &mut Comparing, batch: &mut Batch) -> Option<Vec<Option<u32>>> {
        lane.leave(deltas, batch);
        let bytes = lane.compare(deltas, batch)?;
        let came = Came::parse(batch.bodies().len(), bytes).unwrap();
        Some(came.iter().map(|delta| delta.base().map(|base| base.0)).collect())
    }

    #[test]
    fn what_was_placed_is_the_base_of_what_is_sent_next() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let mut lane = Comparing::default();
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1)]);
        assert_eq!(send(&deltas, &mut lane, &mut first), None, "nothing is there");
        let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 2)]);
        assert_eq!(send(&deltas, &mut lane, &mut second), None, "it may not have come");
        deltas.placed(&first);
        // Page 3 has left in a newer version, which may come at any time.
        let mut third = batch(&pool, 0, 3, &[(3, 3), (5, 3)]);
        assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![None, Some(1)]));
        deltas.placed(&second);
        deltas.placed(&third);
        let mut fourth = batch(&pool, 0, 4, &[(3, 4), (4, 4), (5, 3), (6, 4)]);
        let bases = send(&deltas, &mut lane, &mut fourth);
        assert_eq!(bases, Some(vec![Some(3), Some(2), Some(3), None]));
        assert_eq!(deltas.pages(), 4);
        // What is sent again by another lane goes whole: nothing newer is there.
        deltas.placed(&fourth);
        assert_eq!(send(&deltas, &mut lane, &mut fourth), None);
    }

    /// One of QEMU's channels is read later than another.
    #[test]
    fn an_older_version_does_not_leave_after_a_newer_one() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let mut lane = Comparing::default();
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1), (9, 1)]);
        send(&deltas, &mut lane, &mut first);
        deltas.placed(&first);
        let mut third = batch(&pool, 0, 3, &[(3, 3), (4, 3), (9, 3)]);
        assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![Some(1); 3]));
        let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 2), (5, 2)]);
        (8..11).for_each(|page| second.push_fill(PageIndex(page), 0));
        assert_eq!(lane.leave(&deltas, &mut second), 2);
        let left: Vec<u32> = second.bodies().iter().map(|body| body.page.0).collect();
        assert_eq!(left, [5], "the others have left in a newer version");
        let fill = |first| Fill { first: PageIndex(first), count: 1, byte: 0 };
        assert_eq!(second.fills(), [fill(8), fill(10)]);
        // It goes as a delta, and what comes twice is no older one.
        assert!(lane.compare(&deltas, &second).is_some());
        assert_eq!(lane.leave(&deltas, &mut third), 0);
    }

    #[test]
    fn only_what_has_changed_goes() {
        let (deltas, pool) = (deltas(), Pool::new(4 * SLOT_BYTES));
        let mut lane = Comparing::default();
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1)]);
        send(&deltas, &mut lane, &mut first);
        deltas.placed(&first);
        let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 1)]);
        lane.leave(&deltas, &mut second);
        let bytes = lane.compare(&deltas, &second).unwrap();
        assert_eq!(bytes.len(), 16 + PART_BYTES, "one part of the first page");
        for (nth, delta) in Came::parse(2, bytes).unwrap().iter().enumerate() {
            let mut page = first.bytes_of(first.bodies()[nth]).to_vec();
            delta.apply(&mut page);
            assert_eq!(page, second.bytes_of(second.bodies()[nth]));
        }
    }

    #[test]
    fn what_leaves_in_another_form_is_no_base() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let (mut lane, mut other) = (Comparing::default(), Comparing::default());
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1)]);
        send(&deltas, &mut lane, &mut first);
        deltas.placed(&first);
        // One as a fill, and one by its name: a stage takes it out of the batch.
        let mut second = batch(&pool, 0, 2, &[(4, 2)]);
        second.push_fill(PageIndex(3), 0);
        other.leave(&deltas, &mut second);
        second.retain_bodies(|_, _| false);
        assert_eq!(other.compare(&deltas, &second), None);
        deltas.placed(&second);
        let mut third = batch(&pool, 0, 3, &[(3, 3), (4, 3), (5, 3)]);
        assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![None, None, Some(1)]));
    }

    #[test]
    fn a_batch_from_which_pages_were_taken_is_compared_by_its_pages() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let mut lane = Comparing::default();
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 2), (5, 3), (6, 4)]);
        send(&deltas, &mut lane, &mut first);
        deltas.placed(&first);
        let mut second = batch(&pool, 0, 2, &[(3, 1), (4, 2), (5, 3), (6, 9)]);
        lane.leave(&deltas, &mut second);
        second.retain_bodies(|nth, _| nth % 2 == 1);
        let bytes = lane.compare(&deltas, &second).unwrap();
        assert_eq!(bytes.len(), 2 * 8 + PART_BYTES, "page 4 has not changed");
        // What a lane knows of one batch says nothing of another.
        let third = batch(&pool, 0, 3, &[(4, 1)]);
        assert_eq!(lane.compare(&deltas, &third), None);
    }

    #[test]
    fn neither_ram_that_can_not_be_read_there_nor_a_busy_cpu_has_bases() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let mut lane = Comparing::default();
        for block in [1, 2] {
            for epoch in 1..3 {
                let mut batch = batch(&pool, block, epoch, &[(3, 1)]);
                assert_eq!(send(&deltas, &mut lane, &mut batch), None);
                deltas.placed(&batch);
            }
        }
        deltas.note_pages(false);
        let mut first = batch(&pool, 0, 1, &[(3, 1), (5000, 1)]);
        assert_eq!(send(&deltas, &mut lane, &mut first), None);
        deltas.placed(&first);
        assert_eq!(send(&deltas, &mut lane, &mut batch(&pool, 0, 2, &[(3, 1)])), None);
        assert!(deltas.known.lock().records.is_empty());
    }

    #[test]
    fn records_go_to_what_is_sent_again() {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        deltas.known.lock().records_max = 4;
        let mut lane = Comparing::default();
        let mut again = |epoch, page| {
            let mut batch = batch(&pool, 0, epoch, &[(page, 1)]);
            let bases = send(&deltas, &mut lane, &mut batch);
            deltas.placed(&batch);
            bases.is_some()
        };
        // Two that are sent again and again, among many that are not.
        for epoch in 1..200 {
            let is_known = [again(epoch, 7), again(epoch, 8)];
            assert_eq!(is_known, [epoch > 1; 2], "{epoch}");
            again(epoch, 100 + epoch);
        }
        assert_eq!(deltas.known.lock().records.len(), 4);
    }
}
