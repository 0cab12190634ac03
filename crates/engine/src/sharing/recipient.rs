//! One VM that arrives, as far as pages by name go: what was asked of its source,
//! what it still waits for, and where its pages are.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use content::{Holder, Key, Member, Name};
use crossbeam_channel::Sender;
use page::{BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};
use parking_lot::Mutex;
use placer::Placer;
use qemu::process::Process;
use ram::Mapping;
use wire::Late;

use super::in_flight::Provider;

/// Pages that one VM waits for at most: what they cost here and at the source is
/// some 150 bytes each. More are sent at once.
const WAITING_MAX: usize = 1 << 20;
/// Names that count, for each page of the VM.
const NAMED_PER_PAGE: u64 = 4;

/// The RAM of a VM, as the index of content reads it: its pages numbered over all
/// blocks.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    blocks: Vec<Numbered>,
    pages: u64,
}

#[derive(Debug)]
struct Numbered {
    first: u64,
    pages: u64,
    /// None if it can't be read.
    mapping: Option<Arc<Mapping>>,
}

impl Blocks {
    pub(crate) fn push(&mut self, bytes: u64, mapping: Option<Arc<Mapping>>) {
        let pages = bytes / PAGE_BYTES as u64;
        self.blocks.push(Numbered { first: self.pages, pages, mapping });
        self.pages += pages;
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// The number of a page that can be read.
    fn number(&self, block: BlockId, page: PageIndex) -> Option<u64> {
        let block = self.blocks.get(usize::from(block.0))?;
        block.mapping.as_ref()?;
        let page = u64::from(page.0);
        (page < block.pages).then(|| block.first + page)
    }
}

impl Blocks {
    /// The process whose memory it is; none if nothing of it can be read, or the
    /// process has ended.
    pub(super) fn process(&self) -> Option<Process> {
        let mapping = self.blocks.iter().find_map(|block| block.mapping.as_ref())?;
        let process = Process::now(mapping.pid()).ok()?;
        mapping.still_there().ok().map(|()| process)
    }
}

impl Blocks {
    /// What is in memory of the pages from `first` on, all of one block, which
    /// begin as far into it.
    fn present_in(block: &Numbered, first: u64, present: &mut [bool]) {
        let offset = (first - block.first) * PAGE_BYTES as u64;
        let known = block.mapping.as_ref().map(|mapping| mapping.present(offset, present));
        if !matches!(known, Some(Ok(()))) {
            present.fill(false);
        }
    }

    /// Where a page is that can be read: its block, and its offset there.
    fn find(&self, page: u64) -> Option<(&Arc<Mapping>, u64)> {
        let after = self.blocks.partition_point(|block| block.first <= page);
        let block = self.blocks.get(after.checked_sub(1)?)?;
        let nth = page - block.first;
        let mapping = block.mapping.as_ref().filter(|_| nth < block.pages)?;
        Some((mapping, nth * PAGE_BYTES as u64))
    }
}

impl Holder for Blocks {
    fn read(&self, page: u64, into: &mut [u8]) -> bool {
        self.find(page).is_some_and(|(mapping, offset)| mapping.read(offset, into).is_ok())
    }

    fn read_many(&self, pages: &[u64], into: &mut [u8]) -> usize {
        let places: Vec<_> = pages.iter().map_while(|page| self.find(*page)).collect();
        let mut done = 0;
        // Pages of one block in one go.
        for run in places.chunk_by(|(one, _), (next, _)| Arc::ptr_eq(one, next)) {
            let bytes = done * PAGE_BYTES..(done + run.len()) * PAGE_BYTES;
            let offsets = run.iter().map(|(_, offset)| *offset);
            let read = run.first().zip(into.get_mut(bytes));
            if read.is_none_or(|((mapping, _), into)| mapping.gather(offsets, into).is_err()) {
                break;
            }
            done += run.len();
        }
        done
    }

    /// What is not in memory is not worth getting it there.
    fn present(&self, first: u64, mut present: &mut [bool]) {
        let mut page = first;
        let after = self.blocks.partition_point(|block| block.first + block.pages <= page);
        for block in self.blocks.get(after..).unwrap_or_default() {
            if present.is_empty() {
                return;
            }
            let left = usize::try_from(block.first + block.pages - page).unwrap_or(usize::MAX);
            let (here, rest) = present.split_at_mut(left.min(present.len()));
            Self::present_in(block, page, here);
            page += here.len() as u64;
            present = rest;
        }
        present.fill(false);
    }
}

/// Where one page goes, and how its source is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) block: BlockId,
    pub(super) epoch: Epoch,
    pub(super) page: PageIndex,
    pub(super) ticket: u32,
    /// In its batch.
    pub(super) nth: u8,
}

pub(super) struct Recipient {
    pub(super) number: u64,
    pub(super) key: Key,
    pub(super) placer: Arc<Placer>,
    pub(super) member: Arc<Member>,
    pub(super) blocks: Arc<Blocks>,
    /// What its source was asked for, having sent the name in that epoch.
    asked: Mutex<HashMap<(BlockId, PageIndex), (Epoch, Name)>>,
    /// Batches of which it waits for pages, and for how many.
    pub(super) tickets: Mutex<HashMap<u32, usize>>,
    waiting: AtomicUsize,
    /// Pages whose names have come; pages that other hosts have sent, and disks.
    named: AtomicU64,
    fetched: AtomicU64,
    stored: AtomicU64,
    /// Pages that its source sends though somebody else brings the same.
    again: AtomicU64,
    /// Where its source is told of tickets that are complete; none: it is over.
    tell: Mutex<Option<Sender<Late>>>,
    over: AtomicBool,
}

impl Recipient {
    pub(super) fn new(
        number: u64,
        key: Key,
        placer: Arc<Placer>,
        (member, blocks): (Arc<Member>, Arc<Blocks>),
        tell: Sender<Late>,
    ) -> Self {
        Self {
            number,
            key,
            placer,
            member,
            blocks,
            asked: Mutex::default(),
            tickets: Mutex::default(),
            waiting: AtomicUsize::new(0),
            named: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            again: AtomicU64::new(0),
            tell: Mutex::new(Some(tell)),
            over: AtomicBool::new(false),
        }
    }

    /// Whether it may say that so many names more are on their way. A source names
    /// each page once, or twice if a lane dies; one that goes on and on would have
    /// us keep all that it says.
    pub(super) fn may_claim(&self, pages: usize) -> bool {
        let named = self.named.fetch_add(pages as u64, Relaxed);
        named < NAMED_PER_PAGE * self.blocks.pages()
    }

    pub(super) fn may_wait(&self) -> bool {
        !self.is_over() && self.waiting.load(Relaxed) < WAITING_MAX
    }

    /// Its source is told of the batch only after [`Recipient::close_ticket`]: until
    /// then more of its pages may wait.
    pub(super) fn open_ticket(tickets: &mut HashMap<u32, usize>, ticket: u32) {
        tickets.insert(ticket, 1);
    }

    /// More pages of the batch wait.
    pub(super) fn wait(&self, tickets: &mut HashMap<u32, usize>, ticket: u32, pages: usize) {
        if let Some(left) = tickets.get_mut(&ticket) {
            self.waiting.fetch_add(pages, Relaxed);
            *left += pages;
        }
    }

    /// No more pages of the batch wait than do. Its source is told what becomes of
    /// them, if it `is_told` that some do.
    pub(super) fn close_ticket(&self, ticket: u32, is_told: bool) {
        if is_told {
            self.release_one(ticket, None);
        } else {
            self.tickets.lock().remove(&ticket);
        }
    }

    /// So many pages have come from elsewhere.
    pub(super) fn brought(&self, by: Provider, pages: usize) {
        let count = match by {
            Provider::Disk(_) => &self.stored,
            Provider::Peer(_) | Provider::Vm(_) => &self.fetched,
        };
        count.fetch_add(pages as u64, Relaxed);
    }

    /// What other hosts have sent.
    pub(super) fn fetched_bytes(&self) -> u64 {
        self.fetched.load(Relaxed) * PAGE_BYTES as u64
    }

    /// Its source sends so many pages that were brought, or are, by somebody else.
    pub(super) fn waited_in_vain(&self, pages: usize) {
        self.again.fetch_add(pages as u64, Relaxed);
    }

    /// What came again.
    pub(super) fn again_bytes(&self) -> u64 {
        self.again.load(Relaxed) * PAGE_BYTES as u64
    }

    /// What disks have given.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored.load(Relaxed) * PAGE_BYTES as u64
    }

    /// These pages have that content now: the index knows.
    pub(super) fn note(&self, block: BlockId, named: impl Iterator<Item = (PageIndex, Name)>) {
        let number = |(page, name)| Some((self.blocks.number(block, page)?, name));
        let numbered: Vec<(u64, Name)> = named.filter_map(number).collect();
        self.member.note(&numbered);
    }

    /// Nothing is placed for it any more.
    pub(super) fn end(&self) {
        self.over.store(true, Relaxed);
        *self.tell.lock() = None;
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Its source will send these. Returns the names of what it was to send before
    /// in their places, and now may never.
    pub(super) fn asks(
        &self,
        pages: impl Iterator<Item = (BlockId, Epoch, PageIndex, Name)>,
    ) -> Vec<Name> {
        let mut asked = self.asked.lock();
        let mut displaced = Vec::new();
        for (block, epoch, page, name) in pages {
            let before = asked.insert((block, page), (epoch, name));
            displaced.extend(before.map(|(_, before)| before).filter(|before| *before != name));
        }
        displaced
    }

    /// Which of these its source has been asked for before, by bits: on a connection
    /// that has died since.
    pub(super) fn has_asked(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        names: &[Name],
    ) -> u128 {
        let asked = self.asked.lock();
        let mut before = 0;
        for (nth, (page, name)) in pages.iter().zip(names).enumerate() {
            if asked.get(&(block, *page)) == Some(&(epoch, *name)) {
                before |= 1 << nth;
            }
        }
        before
    }

    /// Its source has sent these pages. Returns the names of those that were asked
    /// for; the index knows where they are from now on. In a later epoch they may
    /// have other content by now: that shows when it is looked at.
    pub(super) fn came(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]) -> Vec<Name> {
        let mut asked = self.asked.lock();
        if asked.is_empty() {
            return Vec::new();
        }
        let mut came = Vec::new();
        for page in pages {
            let Entry::Occupied(entry) = asked.entry((block, *page)) else { continue };
            if entry.get().0 <= epoch {
                came.push((*page, entry.remove().1));
            }
        }
        drop(asked);
        self.note(block, came.iter().copied());
        came.into_iter().map(|(_, name)| name).collect()
    }

    /// These pages are full of one byte by now. Returns the names of those that were
    /// asked for, and do not come any more.
    pub(super) fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) -> Vec<Name> {
        let mut asked = self.asked.lock();
        if asked.is_empty() || fills.is_empty() {
            return Vec::new();
        }
        let mut runs: Vec<(u32, u32)> =
            fills.iter().map(|fill| (fill.first.0, fill.count)).collect();
        runs.sort_unstable();
        let is_filled = |page: u32| {
            let after = runs.partition_point(|(first, _)| *first <= page);
            after.checked_sub(1).is_some_and(|nth| page - runs[nth].0 < runs[nth].1)
        };
        let over = |(of, page): &(BlockId, PageIndex), (asked_in, _): &mut (Epoch, Name)| {
            *of == block && *asked_in <= epoch && is_filled(page.0)
        };
        asked.extract_if(over).map(|(_, (_, name))| name).collect()
    }

    /// This page is placed, or wanted from its source after all.
    pub(super) fn settled(&self, place: Place, wanted: bool) {
        self.waiting.fetch_sub(1, Relaxed);
        self.release_one(place.ticket, wanted.then_some(place.nth));
    }

    fn release_one(&self, ticket: u32, wanted: Option<u8>) {
        let mut tickets = self.tickets.lock();
        let Some(left) = tickets.get_mut(&ticket) else { return };
        *left -= 1;
        let more = *left > 0;
        if !more {
            tickets.remove(&ticket);
        }
        // What is wanted does not wait for the rest. Told in the lock: the last word on
        // a batch must be the last.
        if let Some(tell) = self.tell.lock().as_ref().filter(|_| !more || wanted.is_some()) {
            // A source that is gone need not know.
            let _ = tell.send(Late { ticket, wanted: wanted.into_iter().collect(), more });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_numbered_over_blocks_and_read_where_that_can_be() {
        let mut blocks = Blocks::default();
        let [first, last] = [3, 2].map(|pages| Arc::new(Mapping::own(pages * PAGE_BYTES as u64)));
        blocks.push(3 * PAGE_BYTES as u64, Some(Arc::clone(&first)));
        blocks.push(4 * PAGE_BYTES as u64, None);
        blocks.push(2 * PAGE_BYTES as u64, Some(Arc::clone(&last)));
        for (page, byte) in [10, 11, 12].into_iter().enumerate() {
            first.fill((page * PAGE_BYTES) as u64, PAGE_BYTES as u64, byte).unwrap();
        }
        last.fill(PAGE_BYTES as u64, PAGE_BYTES as u64, 18).unwrap();
        assert_eq!(blocks.pages(), 9);
        assert_eq!(blocks.number(BlockId(2), PageIndex(1)), Some(8));
        assert_eq!(blocks.number(BlockId(2), PageIndex(2)), None);
        assert_eq!(blocks.number(BlockId(1), PageIndex(0)), None, "it can't be read");
        assert_eq!(blocks.number(BlockId(3), PageIndex(0)), None);
        let mut page = vec![0; PAGE_BYTES];
        assert!(blocks.read(8, &mut page) && page.iter().all(|byte| *byte == 18));
        assert!(!blocks.read(4, &mut page) && !blocks.read(9, &mut page));
        let mut pages = vec![0; 5 * PAGE_BYTES];
        assert_eq!(blocks.read_many(&[2, 0, 8, 1, 5], &mut pages), 4);
        let firsts: Vec<u8> = pages.chunks(PAGE_BYTES).map(|page| page[0]).collect();
        assert_eq!(firsts[..4], [12, 10, 18, 11]);
        let process = |blocks: &Blocks| blocks.process().map(|process| process.pid());
        assert_eq!(process(&blocks), Some(std::process::id()));
        assert_eq!(process(&Blocks::default()), None);
    }

    #[test]
    fn only_what_is_in_memory_is_looked_at() {
        let mut blocks = Blocks::default();
        let [first, last] = [300, 200].map(|pages| Arc::new(Mapping::own(pages * 4096)));
        blocks.push(300 * 4096, Some(Arc::clone(&first)));
        blocks.push(100 * 4096, None);
        blocks.push(200 * 4096, Some(Arc::clone(&last)));
        for (mapping, page) in [(&first, 7), (&first, 299), (&last, 0), (&last, 199)] {
            mapping.fill(page * 4096, 4096, 9).unwrap();
        }
        let there = |first, pages| {
            let mut present = vec![true; pages];
            blocks.present(first, &mut present);
            (first..).zip(present).filter_map(|(page, there)| there.then_some(page)).collect()
        };
        let all: Vec<u64> = there(0, 700);
        assert_eq!(all, [7, 299, 400, 599]);
        let some: Vec<u64> = there(299, 102);
        assert_eq!(some, [299, 400]);
        // A scanner finds these, and gives memory to no other.
        let index = content::Index::new(1 << 20);
        let key = Key::new(b"", &content::Domain::default());
        let holder = Arc::new(blocks);
        let member = index.join(Arc::clone(&holder) as _, key, holder.pages()).unwrap();
        let scanner = content::Scanner::start(&index, 1.0).unwrap();
        while member.scanned().rounds == 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(scanner);
        assert_eq!(member.scanned().named, 4);
        let mut present = [true; 600];
        holder.present(0, &mut present);
        assert_eq!(present.iter().filter(|there| **there).count(), 4);
    }
}
