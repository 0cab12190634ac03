//! One VM that arrives, as far as pages by name go: what was asked of its source,
//! what it still waits for, and where its pages are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use content::{Holder, Key, Member, Name};
use crossbeam_channel::Sender;
use page::{BlockId, Epoch, PAGE_BYTES, PageIndex};
use parking_lot::Mutex;
use placer::Placer;
use ram::Mapping;
use wire::Late;

/// Pages that one VM waits for at most: what they cost here and at the source is
/// some 150 bytes each. More are sent at once.
const WAITING_MAX: usize = 1 << 20;
/// Names that count, for each page of the VM.
const NAMED_PER_PAGE: u64 = 3;

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
    /// Whether the VM's process is still there.
    pub(super) fn is_there(&self) -> bool {
        let readable = self.blocks.iter().find(|block| block.mapping.is_some() && block.pages > 0);
        readable.is_some_and(|block| self.read(block.first, &mut [0; PAGE_BYTES]))
    }
}

impl Holder for Blocks {
    fn read(&self, page: u64, into: &mut [u8]) -> bool {
        let after = self.blocks.partition_point(|block| block.first <= page);
        let Some(block) = after.checked_sub(1).and_then(|nth| self.blocks.get(nth)) else {
            return false;
        };
        let offset = (page - block.first) * PAGE_BYTES as u64;
        let Some(mapping) = block.mapping.as_ref().filter(|_| page - block.first < block.pages)
        else {
            return false;
        };
        mapping.read(offset, into).is_ok()
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

/// Pages of a batch that the VM waits for.
#[derive(Debug, Default)]
pub(super) struct Ticket {
    pub(super) left: usize,
    pub(super) wanted: Vec<u8>,
}

pub(super) struct Taker {
    pub(super) number: u64,
    pub(super) key: Key,
    pub(super) placer: Arc<Placer>,
    pub(super) member: Arc<Member>,
    pub(super) blocks: Arc<Blocks>,
    /// What its source was asked for, having sent the name.
    asked: Mutex<HashMap<(BlockId, PageIndex), Name>>,
    pub(super) tickets: Mutex<HashMap<u32, Ticket>>,
    waiting: AtomicUsize,
    /// Pages whose names have come.
    named: AtomicU64,
    /// Where its source is told of tickets that are complete; none: it is over.
    tell: Mutex<Option<Sender<Late>>>,
    over: AtomicBool,
}

impl Taker {
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

    pub(super) fn waits(&self, pages: usize) {
        self.waiting.fetch_add(pages, Relaxed);
    }

    /// Nothing is placed for it any more.
    pub(super) fn end(&self) {
        self.over.store(true, Relaxed);
        *self.tell.lock() = None;
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Its source will send these.
    pub(super) fn asks(&self, pages: impl Iterator<Item = (BlockId, PageIndex, Name)>) {
        let mut asked = self.asked.lock();
        asked.extend(pages.map(|(block, page, name)| ((block, page), name)));
    }

    /// Its source has sent these pages. Returns the names of those that were asked
    /// for; the index knows where they are from now on.
    pub(super) fn came(&self, block: BlockId, pages: &[PageIndex]) -> Vec<Name> {
        let mut asked = self.asked.lock();
        if asked.is_empty() {
            return Vec::new();
        }
        let named = |page: &PageIndex| Some((*page, asked.remove(&(block, *page))?));
        let came: Vec<(PageIndex, Name)> = pages.iter().filter_map(named).collect();
        drop(asked);
        let number =
            |(page, name): &(PageIndex, Name)| Some((self.blocks.number(block, *page)?, *name));
        let numbered: Vec<(u64, Name)> = came.iter().filter_map(number).collect();
        self.member.note(&numbered);
        came.into_iter().map(|(_, name)| name).collect()
    }

    /// This page is placed, or wanted from its source after all.
    pub(super) fn settled(&self, place: Place, wanted: bool) {
        self.waiting.fetch_sub(1, Relaxed);
        let mut tickets = self.tickets.lock();
        let Some(ticket) = tickets.get_mut(&place.ticket) else { return };
        ticket.left -= 1;
        if wanted {
            ticket.wanted.push(place.nth);
        }
        if ticket.left == 0
            && let Some(ticket) = tickets.remove(&place.ticket)
        {
            drop(tickets);
            if let Some(tell) = &*self.tell.lock() {
                // A source that is gone need not know.
                let _ = tell.send(Late { ticket: place.ticket, wanted: ticket.wanted });
            }
        }
    }
}
