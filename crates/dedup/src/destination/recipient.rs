//! An arriving VM's pages by name: which were requested from its source, and which are still
//! awaited.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use content::{Key, Member, Name};
use crossbeam_channel::Sender;
use page::{BATCH_PAGES, BlockId, Borrowed, Epoch, Fill, PAGE_BYTES, PageIndex, PageSet, Reserve};
use parking_lot::Mutex;
use wire::Late;

use super::blocks::Blocks;
use super::in_flight::{Provider, trim};
use super::outbox::SourceReport;
use super::page_placer::PagePlacer;

/// The most pages that one VM waits for. More are sent at once.
pub(super) const WAITING_MAX: usize = 1 << 20;
/// What is kept of a page that its source has named, until its content is here: entries in two
/// tables and a waiter, or a report that the source has not read.
const NOTED_BYTES: usize = 256;
/// The most memory for such pages of all VMs together, beyond what each has by itself: as much as
/// one VM may wait for.
pub const NAMED_BYTES_MAX: usize = WAITING_MAX * NOTED_BYTES;
/// What each VM has by itself: what a source names before the first answer, and what waits for the
/// rack. It is about as much as a VM's smallest part of the pool.
pub(super) const OWN_PAGES: usize = 64 * BATCH_PAGES;
/// Memory is borrowed in steps of this size.
const STEP_BYTES: usize = 64 << 10;
/// The most names that are accepted per page of the VM.
const NAMED_PER_PAGE: u64 = 4;

/// Where one page is placed, and how the source is notified of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AwaitedPage {
    pub(crate) block: BlockId,
    pub(crate) epoch: Epoch,
    pub(crate) page: PageIndex,
    pub(crate) ticket: u32,
    /// The page's index in its batch.
    pub(crate) nth: u8,
}

pub(crate) struct Recipient {
    pub(crate) number: u64,
    pub(crate) key: Key,
    pub(crate) placer: Arc<dyn PagePlacer>,
    pub(crate) member: Arc<Member>,
    pub(crate) blocks: Arc<Blocks>,
    /// Its source names no page yet.
    sleeps: AtomicBool,
    /// Pages requested from its source, with the epoch and name that it sent.
    asked: Mutex<HashMap<(BlockId, PageIndex), (Epoch, Name)>>,
    /// Tickets of batches with awaited pages, and how many.
    pub(crate) tickets: Mutex<HashMap<u32, usize>>,
    waiting: AtomicUsize,
    /// For pages that are requested or awaited, or reported.
    memory: Mutex<Borrowed>,
    /// Pages named by the source, then those sent by other hosts, and those read from disks.
    named: AtomicU64,
    fetched: AtomicU64,
    stored: AtomicU64,
    /// Pages that its source sends although another provider has the same.
    again: AtomicU64,
    /// Reports to its source. None once it has ended.
    tell: Mutex<Option<Sender<SourceReport>>>,
    over: AtomicBool,
}

impl Recipient {
    pub(crate) fn new(
        (number, key): (u64, Key),
        placer: Arc<dyn PagePlacer>,
        (member, blocks): (Arc<Member>, Arc<Blocks>),
        tell: Sender<SourceReport>,
        sleeps: bool,
        memory: &Arc<Reserve>,
    ) -> Self {
        Self {
            sleeps: AtomicBool::new(sleeps),
            number,
            key,
            placer,
            member,
            blocks,
            memory: Mutex::new(Borrowed::new(memory, OWN_PAGES * NOTED_BYTES)),
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

    /// Whether it may claim so many more names. A source names each page once, or twice if a lane
    /// dies. Without a limit, a faulty one could fill this host's memory with names: by naming pages
    /// again and again, by naming many and sending none, or by not reading what happens to them.
    pub(crate) fn may_claim(&self, pages: usize) -> bool {
        let named = self.named.fetch_add(pages as u64, Relaxed);
        named < NAMED_PER_PAGE * self.blocks.pages() && self.has_memory(pages)
    }

    /// Whether so many more pages can be recorded, in addition to those that are.
    fn has_memory(&self, pages: usize) -> bool {
        let bytes = self.noted_bytes(pages);
        let mut memory = self.memory.lock();
        memory.shrink_to(bytes);
        memory.grow_to(bytes)
    }

    /// Gives back memory that is not used any more. Its source may name no more pages.
    pub(super) fn trim(&self) {
        let bytes = self.noted_bytes(0);
        self.memory.lock().shrink_to(bytes);
    }

    /// The memory for pages that are recorded, and for so many more.
    fn noted_bytes(&self, more: usize) -> usize {
        let reports = self.tell.lock().as_ref().map_or(0, Sender::len);
        let noted = self.asked.lock().len() + self.waiting.load(Relaxed) + reports;
        ((noted + more) * NOTED_BYTES).next_multiple_of(STEP_BYTES)
    }

    /// Tells its source that there may be content to find.
    pub(crate) fn wake(&self) {
        if self.sleeps.swap(false, Relaxed)
            && let Some(tell) = &*self.tell.lock()
        {
            // The thread that tells the source may have ended.
            let _ = tell.send(SourceReport::Share);
        }
    }

    pub(crate) fn may_wait(&self) -> bool {
        !self.is_over() && self.waiting.load(Relaxed) < WAITING_MAX
    }

    /// Opens a batch. Its source is notified that the batch has ended only after
    /// [`Recipient::close_ticket`]: until then, more pages may wait.
    pub(crate) fn open_ticket(tickets: &mut HashMap<u32, usize>, ticket: u32) {
        tickets.insert(ticket, 1);
    }

    /// More pages of the batch wait. Counted under the lock under which they are settled, so that
    /// none is settled before it is counted.
    pub(crate) fn wait(&self, tickets: &mut HashMap<u32, usize>, ticket: u32, pages: usize) {
        self.waiting.fetch_add(pages, Relaxed);
        // A source that uses a ticket twice may have ended it.
        if let Some(left) = tickets.get_mut(&ticket) {
            *left += pages;
        }
    }

    /// No more pages of the batch begin to wait. Reports what happens to those that do, if the
    /// source `is_told` of them.
    pub(crate) fn close_ticket(&self, ticket: u32, is_told: bool) {
        if is_told {
            self.release_one(&mut self.tickets.lock(), ticket, None);
        } else {
            self.tickets.lock().remove(&ticket);
        }
    }

    /// Counts pages that a provider other than the source has sent.
    pub(crate) fn brought(&self, by: Provider, pages: usize) {
        let count = match by {
            Provider::Disk(_) => &self.stored,
            Provider::Peer(_) => &self.fetched,
            // Nothing was sent or read for it.
            Provider::Vm(_) => return,
        };
        count.fetch_add(pages as u64, Relaxed);
    }

    /// What other hosts have sent.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.fetched.load(Relaxed) * PAGE_BYTES as u64
    }

    /// Counts pages that its source sends although another provider sends or sent them.
    pub(crate) fn waited_in_vain(&self, pages: usize) {
        self.again.fetch_add(pages as u64, Relaxed);
    }

    /// What its source sent although another provider had it.
    pub(crate) fn again_bytes(&self) -> u64 {
        self.again.load(Relaxed) * PAGE_BYTES as u64
    }

    /// What was read from disks.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored.load(Relaxed) * PAGE_BYTES as u64
    }

    /// Whether its content can be copied from its memory, for other VMs.
    pub(crate) fn provides(&self) -> bool {
        self.blocks.can_be_read()
    }

    /// Records in the index that these pages now have that content.
    pub(crate) fn holds(&self, block: BlockId, named: impl Iterator<Item = (PageIndex, Name)>) {
        let number = |(page, name)| Some((self.blocks.number(block, page)?, name));
        let numbered: Vec<(u64, Name)> = named.filter_map(number).collect();
        self.member.note(&numbered);
    }

    /// A note for the operator's report.
    pub(crate) fn note(&self, text: String) {
        if let Some(tell) = self.tell.lock().as_ref() {
            // A source that has disconnected need not know.
            let _ = tell.send(SourceReport::Note(text));
        }
    }

    /// Ends it: nothing is placed for it any more.
    pub(crate) fn end(&self) {
        self.over.store(true, Relaxed);
        *self.tell.lock() = None;
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Notes that these are requested from its source. Returns the names requested before for the
    /// same pages, whose content may now never arrive.
    pub(crate) fn asks(
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

    /// Its source sends these pages, which is not noted. Returns the names requested before for the
    /// same pages, as [`Recipient::asks`].
    pub(crate) fn displaces<'n>(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: impl Iterator<Item = (&'n PageIndex, &'n Name)>,
    ) -> Vec<Name> {
        let mut asked = self.asked.lock();
        let mut displaced = Vec::new();
        for (page, name) in pages {
            let Entry::Occupied(entry) = asked.entry((block, *page)) else { continue };
            let (asked_in, before) = entry.get();
            if *asked_in <= epoch && before != name {
                displaced.push(entry.remove().1);
            }
        }
        displaced
    }

    /// Whether nearly all that was requested from its source has arrived.
    pub(crate) fn source_is_idle(&self) -> bool {
        self.asked.lock().len() < BATCH_PAGES
    }

    /// Which of these were requested before, on a connection that has died since.
    pub(crate) fn has_asked(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        names: &[Name],
    ) -> PageSet {
        let asked = self.asked.lock();
        let is_asked = |page, name| asked.get(&(block, page)) == Some(&(epoch, name));
        let pages = pages.iter().zip(names).enumerate();
        pages.filter(|(_, (page, name))| is_asked(**page, **name)).map(|(nth, _)| nth).collect()
    }

    /// Its source has sent these pages, and their `names` or none. Returns the names of those that
    /// were requested. Records in the index what has a name: in a later epoch the content may
    /// differ, but each look-up checks it.
    pub(crate) fn came(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        names: &[Name],
    ) -> Vec<Name> {
        let came = self.requested(block, epoch, pages);
        if names.is_empty() {
            self.holds(block, came.iter().map(|(nth, name)| (pages[*nth], *name)));
        } else {
            self.holds(block, pages.iter().copied().zip(names.iter().copied()));
        }
        came.into_iter().map(|(_, name)| name).collect()
    }

    /// Its source has sent these pages. Returns which of them were requested, by their indices, and
    /// their names.
    pub(crate) fn requested(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
    ) -> Vec<(usize, Name)> {
        let mut asked = self.asked.lock();
        if asked.is_empty() {
            return Vec::new();
        }
        let mut came = Vec::new();
        for (nth, page) in pages.iter().enumerate() {
            let Entry::Occupied(entry) = asked.entry((block, *page)) else { continue };
            if entry.get().0 <= epoch {
                came.push((nth, entry.remove().1));
            }
        }
        trim(&mut asked);
        came
    }

    /// These pages are filled with one byte by now. Returns the names of those that were
    /// requested, and won't arrive any more.
    pub(crate) fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) -> Vec<Name> {
        let mut asked = self.asked.lock();
        if asked.is_empty() || fills.is_empty() {
            return Vec::new();
        }
        // A page that is requested after it has arrived does not arrive again, and stays here: there
        // may be many, and most batches have fills.
        let filled = fills.iter().map(|fill| u64::from(fill.count)).sum::<u64>();
        if filled < asked.len() as u64 {
            let pages = fills.iter().flat_map(|Fill { first, count, .. }| {
                (first.0..first.0.saturating_add(*count)).map(PageIndex)
            });
            let take = |page| match asked.entry((block, page)) {
                Entry::Occupied(entry) if entry.get().0 <= epoch => Some(entry.remove().1),
                _ => None,
            };
            return pages.filter_map(take).collect();
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
        let filled = asked.extract_if(over).map(|(_, (_, name))| name).collect();
        trim(&mut asked);
        filled
    }

    /// An awaited page is placed, or `wanted` from its source after all.
    pub(crate) fn settled(&self, place: AwaitedPage, wanted: bool) {
        let mut tickets = self.tickets.lock();
        self.waiting.fetch_sub(1, Relaxed);
        self.release_one(&mut tickets, place.ticket, wanted.then_some(place.nth));
    }

    fn release_one(&self, tickets: &mut HashMap<u32, usize>, ticket: u32, wanted: Option<u8>) {
        let Some(left) = tickets.get_mut(&ticket) else { return };
        *left -= 1;
        let more = *left > 0;
        if !more {
            tickets.remove(&ticket);
        }
        // A wanted page is reported without waiting for the rest. Sent under the lock, so that
        // the last report on a batch comes last.
        if let Some(tell) = self.tell.lock().as_ref().filter(|_| !more || wanted.is_some()) {
            // A source that has disconnected need not know.
            let wanted = wanted.into_iter().collect();
            let _ = tell.send(SourceReport::Late(Late { ticket, requested: wanted, more }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use content::{Domain, Index, NAME_BYTES};
    use placer::{Feeder, Placer};

    use super::super::outbox::Outbox;
    use super::*;

    /// A VM without RAM, and the reports to its source.
    fn recipient() -> (Recipient, Outbox) {
        let (qemu, _other_end) = UnixStream::pair().unwrap();
        let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).unwrap();
        let placer = Arc::new(Placer::new(Vec::new(), feeder.handle()).unwrap());
        let (index, blocks) = (Index::new(16), Arc::new(Blocks::default()));
        let key = Key::new(b"", &Domain::default());
        let member = index.join(Arc::clone(&blocks) as _, key.clone(), 8).unwrap();
        let (tell, outbox) = Outbox::new();
        let held = (Arc::new(member), blocks);
        let memory = Reserve::new(NAMED_BYTES_MAX);
        (Recipient::new((1, key), placer, held, tell, false, &memory), outbox)
    }

    #[test]
    fn filled_pages_are_no_longer_requested_however_many_others_are() {
        let name = |page: u32| Name([page.to_le_bytes()[0]; NAME_BYTES]);
        for others in [0, 100] {
            let (recipient, _outbox) = recipient();
            let pages = [3, 4, 5, 9].into_iter().chain(100..100 + others);
            // The last one was written since.
            let asked = |page| (BlockId(0), Epoch(1 + page / 9), PageIndex(page), name(page));
            recipient.asks(pages.map(asked));
            let fill = |first, count| Fill { first: PageIndex(first), count, byte: 0 };
            let fills = [fill(8, 2), fill(2, 3)];
            assert!(recipient.filled(BlockId(1), Epoch(1), &fills).is_empty());
            let mut names = recipient.filled(BlockId(0), Epoch(1), &fills);
            names.sort_unstable();
            assert_eq!(names, [name(3), name(4)]);
            assert_eq!(recipient.filled(BlockId(0), Epoch(2), &fills), [name(9)]);
            assert_eq!(recipient.asked.lock().len(), 1 + others as usize);
        }
    }

    /// Another thread may place a page as soon as it waits, before it is counted.
    #[test]
    fn no_page_is_settled_before_it_is_counted() {
        let (recipient, _outbox) = recipient();
        let (block, epoch, page) = (BlockId(0), Epoch(1), PageIndex(0));
        let place = AwaitedPage { block, epoch, page, ticket: 7, nth: 0 };
        let mut tickets = recipient.tickets.lock();
        Recipient::open_ticket(&mut tickets, 7);
        thread::scope(|scope| {
            let settling = scope.spawn(|| recipient.settled(place, false));
            for _ in 0..10_000 {
                thread::yield_now();
                assert!(recipient.may_wait(), "less than nothing waits");
            }
            recipient.wait(&mut tickets, 7, 1);
            drop(tickets);
            settling.join().unwrap();
        });
        assert_eq!(recipient.waiting.load(Relaxed), 0);
    }
}
