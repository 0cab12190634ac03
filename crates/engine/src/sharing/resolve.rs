//! What one VM that arrives does with pages that come by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use content::{Domain, Name};
use crossbeam_channel::{Receiver, unbounded};
use directory::{DirectoryError, HostName};
use page::{BlockId, Epoch, Fill, PageIndex};
use parking_lot::Mutex;
use placer::{PlaceError, Placer};
use wire::{DiskPlace, Late, NamedHeader, NamedTables, ToSource};

use super::coming::{Bringer, Claim};
use super::copies::Copies;
use super::rack::Rack;
use super::storage::{Disks, Shelf, Stored};
use super::taker::{Blocks, Place, Taker};
use super::{Page, Sharing, Waiter};
use crate::link::Link;

/// Batches that the source is told of at a time.
const TOLD_AT_ONCE: usize = 256;

/// Pages by name of one VM that arrives, until it is dropped.
pub(crate) struct Resolving {
    sharing: Arc<Sharing>,
    taker: Arc<Taker>,
    domain: Domain,
    link: Arc<Link<ToSource>>,
    /// Its disks, as far as they are read here.
    shelf: Option<Shelf>,
    /// Whether it was said that other hosts' content is not used.
    noted: AtomicBool,
    /// Buffers of lanes, used again for each batch.
    spare: Mutex<Vec<Copies>>,
    telling: Option<JoinHandle<()>>,
}

impl Sharing {
    /// A VM arrives whose pages may come by name.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn take_in(
        self: &Arc<Self>,
        (domain, asks_rack): (&Domain, bool),
        placer: Arc<Placer>,
        blocks: Blocks,
        disks: Option<Disks>,
        link: Arc<Link<ToSource>>,
    ) -> std::io::Result<Resolving> {
        let number = self.last.fetch_add(1, Relaxed) + 1;
        let key = self.key(domain);
        let blocks = Arc::new(blocks);
        let member = self.index.join(Arc::clone(&blocks) as _, key.clone(), blocks.pages());
        let member = Arc::new(member.ok_or_else(|| {
            std::io::Error::other("more VMs hold content here than can be told apart")
        })?);
        let (tell, told) = unbounded();
        let taker = Arc::new(Taker::new(number, key, placer, (member, blocks), tell, asks_rack));
        let telling = thread::Builder::new().name("late".to_owned()).spawn({
            let link = Arc::clone(&link);
            move || say_late(&told, &link)
        })?;
        self.arriving.lock().insert(number);
        let sharing = Arc::clone(self);
        let shelf = disks.map(|disks| Shelf::new(number, self, disks));
        let (domain, noted) = (domain.clone(), AtomicBool::new(false));
        let (spare, telling) = (Mutex::default(), Some(telling));
        Ok(Resolving { sharing, taker, domain, link, shelf, noted, spare, telling })
    }
}

/// Tells the source what has become of pages that came later.
fn say_late(told: &Receiver<Late>, link: &Link<ToSource>) {
    while let Ok(first) = told.recv() {
        let mut batches = vec![first];
        for late in told.try_iter() {
            match batches.last_mut().filter(|last| last.ticket == late.ticket && last.more) {
                Some(last) => {
                    last.wanted.extend(late.wanted);
                    last.more = late.more;
                }
                None => batches.push(late),
            }
            if batches.len() == TOLD_AT_ONCE {
                break;
            }
        }
        if link.say(&ToSource::Late { batches }).is_err() {
            return;
        }
    }
}

impl Resolving {
    /// The VM, for when it runs here.
    pub(super) fn taker(&self) -> &Taker {
        &self.taker
    }

    /// Copies what is here to where it is wanted. Says which pages that were.
    fn place_held(
        &self,
        header: NamedHeader,
        pages: &[PageIndex],
        names: &[Name],
    ) -> Result<u128, PlaceError> {
        let Taker { key, placer, .. } = &*self.taker;
        let mut copies = self.spare.lock().pop().unwrap_or_default();
        let here = copies.find(&self.sharing.index, key, names, pages.iter().copied());
        let placed = copies.place(placer, header.block, header.epoch);
        self.spare.lock().push(copies);
        placed.map(|()| here)
    }

    /// As [`Self::place_held`], for those of `ours` that came here after they were
    /// looked for and before they were claimed. Nobody need bring these.
    fn place_new(
        &self,
        header: NamedHeader,
        NamedTables { pages, names, .. }: &NamedTables,
        ours: u128,
    ) -> Result<u128, PlaceError> {
        let is_new = |nth: &usize| ours >> nth & 1 == 1 && self.sharing.index.has(&names[*nth]);
        let new: Vec<usize> = (0..names.len()).filter(is_new).collect();
        if new.is_empty() {
            return Ok(0);
        }
        let pages: Vec<PageIndex> = new.iter().map(|nth| pages[*nth]).collect();
        let names: Vec<Name> = new.iter().map(|nth| names[*nth]).collect();
        let placed = self.place_held(header, &pages, &names)?;
        let (mut here, mut over) = (0, Vec::with_capacity(new.len()));
        for (at, nth) in new.iter().enumerate().filter(|(at, _)| placed >> at & 1 == 1) {
            here |= 1 << nth;
            over.push(names[at]);
        }
        self.sharing.over(&over);
        Ok(here)
    }

    /// Claims what is not here. Says what is wanted and what comes later.
    fn claim(
        &self,
        header: NamedHeader,
        named: &NamedTables,
        here: u128,
    ) -> Result<(u128, u128), PlaceError> {
        let NamedTables { pages, names, places, .. } = named;
        let NamedHeader { block, epoch, ticket, .. } = header;
        let taker = &self.taker;
        if !taker.may_claim(pages.len()) {
            let all = u128::MAX >> (128 - pages.len().clamp(1, 128));
            return Ok((all & !here, 0));
        }
        let (now, may_wait) = (Instant::now(), header.may_wait && taker.may_wait());
        let mut wanted = taker.has_asked(block, epoch, pages, names) & !here;
        let (mut ours, mut later) = (0_u128, 0_u128);
        let waiting = |nth: usize| {
            let place =
                Place { block, epoch, page: pages[nth], ticket, nth: u8::try_from(nth).ok()? };
            Some(Page { taker: Arc::clone(taker), place })
        };
        // Held until the ticket is there: what it waits for may come at once.
        let mut tickets = taker.tickets.lock();
        let mut coming = self.sharing.coming.lock();
        for (nth, name) in names.iter().enumerate() {
            if (here | wanted) >> nth & 1 == 1 {
                continue;
            }
            let waits = || waiting(nth).filter(|_| may_wait).map(Waiter::Page);
            match coming.claim(*name, Bringer::Vm(taker.number), now, waits) {
                Claim::Waits => later |= 1 << nth,
                Claim::Yours => ours |= 1 << nth,
                Claim::OnItsWay => {
                    wanted |= 1 << nth;
                    taker.waited_in_vain(1);
                }
            }
        }
        drop(coming);
        let rack = self.sharing.rack.as_ref().filter(|_| taker.asks_rack && ours != 0);
        let shelf = self.shelf.as_ref().filter(|_| may_wait && ours != 0 && !places.is_empty());
        if later != 0 || rack.is_some() || shelf.is_some() {
            Taker::open_ticket(&mut tickets, ticket);
            taker.wait(&mut tickets, ticket, later.count_ones() as usize);
        }
        drop(tickets);
        ours &= !self.place_new(header, named, ours)?;
        if let Some(shelf) = shelf {
            let batch = Claimed { ticket, names, ours, waiting: &waiting };
            let stored = self.have_read(shelf, &batch, places);
            (later, ours) = (later | stored, ours & !stored);
        }
        if let Some(rack) = rack {
            let batch = Claimed { ticket, names, ours, waiting: &waiting };
            let far = self.claim_in(rack, &batch, may_wait);
            (later, ours) = (later | far, ours & !far);
        }
        taker.close_ticket(ticket, later != 0);
        wanted |= ours;
        Ok((wanted, later))
    }

    /// Has read from disks what nobody here has or gets, and a disk should have. Says
    /// what that is.
    fn have_read(&self, shelf: &Shelf, batch: &Claimed<'_>, places: &[Option<DiskPlace>]) -> u128 {
        let by = (Bringer::Vm(self.taker.number), Bringer::Disk(self.taker.number));
        let now = Instant::now();
        let (mut stored, mut wanted) = (0, Vec::with_capacity(places.len()));
        // In this order, as below.
        let mut tickets = self.taker.tickets.lock();
        let mut coming = self.sharing.coming.lock();
        for (nth, (name, place)) in batch.names.iter().zip(places).enumerate() {
            let place = place.filter(|place| batch.ours >> nth & 1 == 1 && shelf.has(*place));
            let Some((place, page)) = place.zip((batch.waiting)(nth)) else { continue };
            if coming.hand_over(name, by, now, Waiter::Page(page)) {
                wanted.push((place, *name));
                stored |= 1 << nth;
            }
        }
        drop(coming);
        self.taker.wait(&mut tickets, batch.ticket, wanted.len());
        drop(tickets);
        shelf.want(&mut wanted);
        stored
    }

    /// The source could send so many of the pages that disks are read for.
    pub(crate) fn spare(&self, pages: u64) {
        if let Some(shelf) = &self.shelf {
            shelf.spare(pages);
        }
    }

    /// What came from disks, and what that took.
    pub(crate) fn stored(&self) -> Stored {
        let read = self.shelf.as_ref().map(Shelf::read).unwrap_or_default();
        Stored { placed_bytes: self.taker.stored_bytes(), ..read }
    }

    /// What of that was not as it should be.
    pub(crate) fn storage_notes(&self) -> Vec<String> {
        self.shelf.as_ref().map(Shelf::notes).unwrap_or_default()
    }

    /// Claims, in the whole rack, what nobody here has or gets. Says what comes from
    /// other hosts.
    fn claim_in(&self, rack: &Rack, batch: &Claimed<'_>, may_wait: bool) -> u128 {
        let Claimed { ticket, names, ours, waiting } = *batch;
        let each: Vec<usize> = (0..names.len()).filter(|nth| ours >> nth & 1 == 1).collect();
        let asked: Vec<Name> = each.iter().map(|nth| names[*nth]).collect();
        let hosts = match rack.claim(&asked) {
            Ok(hosts) => hosts,
            Err(error) => {
                self.note(&error);
                return 0;
            }
        };
        // Others of the rack have it from here now, in any case.
        if !may_wait {
            return 0;
        }
        let mut elsewhere: Vec<(HostName, usize)> =
            hosts.into_iter().zip(each).filter_map(|(host, nth)| Some((host?, nth))).collect();
        elsewhere.sort_unstable();
        let mut far = 0;
        for group in elsewhere.chunk_by(|(one, _), (other, _)| one == other) {
            let host = &group[0].0;
            let Some(line) = rack.line(&self.sharing, host) else { continue };
            let by = (Bringer::Vm(self.taker.number), Bringer::Peer(line));
            let now = Instant::now();
            let mut handed = Vec::with_capacity(group.len());
            // In this order, as above.
            let mut tickets = self.taker.tickets.lock();
            let mut coming = self.sharing.coming.lock();
            for (_, nth) in group {
                let Some(page) = waiting(*nth) else { continue };
                if coming.hand_over(&names[*nth], by, now, Waiter::Page(page)) {
                    handed.push(names[*nth]);
                    far |= 1 << nth;
                }
            }
            drop(coming);
            self.taker.wait(&mut tickets, ticket, handed.len());
            drop(tickets);
            rack.want(host, line, &self.domain, handed);
        }
        far
    }

    /// Says once, for whoever reads the report, why content of other hosts is not used.
    fn note(&self, why: &DirectoryError) {
        if !self.noted.swap(true, Relaxed) {
            let text =
                format!("content of other hosts of the rack is not used for some of it: {why}");
            // A source that is gone need not know.
            let _ = self.link.say(&ToSource::Note { text });
        }
    }

    /// What came from other hosts of the rack.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.taker.fetched_bytes()
    }

    /// What its source sent though somebody else brought the same.
    pub(crate) fn again_bytes(&self) -> u64 {
        self.taker.again_bytes()
    }
}

/// What one batch claims for this host.
struct Claimed<'b> {
    ticket: u32,
    names: &'b [Name],
    /// Those that nobody here has or gets, by bits.
    ours: u128,
    waiting: &'b dyn Fn(usize) -> Option<Page>,
}

impl transport::Resolver for Resolving {
    fn resolve(
        &self,
        header: NamedHeader,
        named: &NamedTables,
    ) -> Result<(u128, u128), PlaceError> {
        let NamedTables { pages, names, .. } = named;
        self.taker.placer.check(header.block, pages)?;
        let here = self.place_held(header, pages, names)?;
        let (wanted, later) = self.claim(header, named, here)?;
        let NamedHeader { block, epoch, .. } = header;
        let asked = pages.iter().zip(names).enumerate().filter(|(nth, _)| wanted >> nth & 1 == 1);
        let asked = asked.map(|(_, (page, name))| (block, epoch, *page, *name));
        self.sharing.over(&self.taker.asks(asked));
        Ok((wanted, later))
    }

    fn came(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]) {
        let names = self.taker.came(block, epoch, pages);
        self.sharing.over(&names);
        let rack = self.sharing.rack.as_ref().filter(|_| self.taker.asks_rack);
        if let Some(rack) = rack.filter(|_| !names.is_empty()) {
            rack.holds(names);
        }
    }

    fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) {
        self.sharing.over(&self.taker.filled(block, epoch, fills));
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        self.taker.end();
        // Joins threads that may hold the sharing for a moment.
        drop(self.shelf.take());
        self.sharing.arriving.lock().remove(&self.taker.number);
        if let Some(telling) = self.telling.take() {
            let _ = telling.join();
        }
    }
}
