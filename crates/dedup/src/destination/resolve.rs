//! How an arriving VM handles pages that the source sends by name.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use content::{Domain, Key, Name};
use data_threads::DataThreads;
use page::{BlockId, Buffer, Epoch, Fill, PAGE_BYTES, PageIndex, PageSet, Reserve};
use transport::{Incoming, LaneEnd};
use wire::{NamedHeader, NamedTables, Tables};

use super::blocks::Blocks;
use super::copies::Copies;
use super::exchange::{Exchange, Waiter};
use super::in_flight::{Claim, Provider};
use super::outbox::Outbox;
use super::page_placer::PagePlacer;
use super::recipient::Recipient;
use crate::rack::{Batch, Claims, Fate};
use crate::storage::{self, DiskReaders, Disks, Stored};

/// Finds the pages by name of one arriving VM, until it is dropped.
pub struct Resolving {
    exchange: Arc<Exchange>,
    recipient: Arc<Recipient>,
    /// Queries the rack, if the VM may use its content.
    claims: Option<Claims>,
    /// Those of its disks that are read here.
    disk_readers: Option<DiskReaders>,
}

/// A VM that arrives, and whose pages may be sent by name.
pub struct Arriving {
    /// What places its pages.
    pub placer: Arc<dyn PagePlacer>,
    /// Its RAM.
    pub blocks: Blocks,
    /// Its disks that are read.
    pub disks: Option<Disks>,
    /// Its source names no page until there may be content to find.
    pub sleeps: bool,
    /// Memory that it shares with all others that arrive, of [`NAMED_BYTES_MAX`].
    ///
    /// [`NAMED_BYTES_MAX`]: super::NAMED_BYTES_MAX
    pub memory: Arc<Reserve>,
}

impl Exchange {
    /// Admits a VM whose pages are named with `key`. If it has a domain `in_rack`, the rack is
    /// queried, too.
    pub(crate) fn admit(
        self: &Arc<Self>,
        key: Key,
        in_rack: Option<&Domain>,
        Arriving { placer, blocks, disks, sleeps, memory }: Arriving,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<(Resolving, Outbox)> {
        let number = self.last.fetch_add(1, Relaxed) + 1;
        let blocks = Arc::new(blocks);
        // Of a VM whose memory can't be read nothing is ever noted.
        let indexed = if blocks.can_be_read() { blocks.pages() } else { 0 };
        let member = self.index.join(Arc::clone(&blocks) as _, key.clone(), indexed);
        let member = Arc::new(member.ok_or_else(|| {
            std::io::Error::other("more VMs hold content here than the index can number")
        })?);
        let (tell, outbox) = Outbox::new();
        let held = (member, blocks);
        let recipient = Recipient::new((number, key), placer, held, tell, sleeps, &memory);
        let recipient = Arc::new(recipient);
        let claims = self
            .rack
            .as_ref()
            .zip(in_rack)
            .map(|(rack, domain)| Claims::start((self, rack), &recipient, domain, threads));
        let claims = claims.transpose()?;
        self.arriving.lock().insert(number);
        self.met(&recipient);
        let exchange = Arc::clone(self);
        let disk_readers = disks.map(|disks| DiskReaders::new(number, self, disks));
        let resolving = Resolving { exchange, recipient, claims, disk_readers };
        Ok((resolving, outbox))
    }
}

impl Resolving {
    /// Admits a VM whose content is not shared: its pages are read from its disks, or found among
    /// those that it has already. The caller sends the [`Outbox`]'s messages to its source.
    pub fn admit_alone(
        secret: &str,
        vm: Arriving,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<(Self, Outbox)> {
        let exchange = Exchange::start_for_one(vm.blocks.pages())?;
        exchange.admit(storage::key(secret), None, vm, threads)
    }

    /// The VM, which provides content once it runs here.
    pub(super) fn recipient(&self) -> &Recipient {
        &self.recipient
    }

    /// Copies content that is here into the VM's RAM. Returns which pages were placed.
    fn place_held(
        &self,
        buffer: &mut Buffer,
        header: NamedHeader,
        pages: &[PageIndex],
        names: &[Name],
    ) -> Result<PageSet, LaneEnd> {
        let Recipient { key, placer, .. } = &*self.recipient;
        let mut copies = Copies::within(std::mem::take(buffer));
        let here = copies.find(&self.exchange.index, key, names, pages.iter().copied());
        let placed = copies.place(&**placer, header.block, header.epoch);
        *buffer = copies.bytes;
        placed.map(|()| here)
    }

    /// As [`Self::place_held`], for claimed content that arrived between the look-up and the
    /// claim. No provider need send it.
    fn place_new(&self, lane: &Incoming, batch: &mut Batch) -> Result<(), LaneEnd> {
        let Batch { header, pages, names, fates, .. } = batch;
        let ours = fates.are(Fate::Ours).iter();
        let new: Vec<usize> = ours.filter(|nth| self.exchange.index.has(&names[*nth])).collect();
        if new.is_empty() {
            return Ok(());
        }
        let new_pages: Vec<PageIndex> = new.iter().map(|nth| pages[*nth]).collect();
        let new_names: Vec<Name> = new.iter().map(|nth| names[*nth]).collect();
        let place = |buffer: &mut _| self.place_held(buffer, *header, &new_pages, &new_names);
        let placed = lane.with_buffer(place)?;
        placed.of(&new).for_each(|nth| fates.set(*nth, Fate::Placed));
        let over: Vec<Name> = placed.of(&new_names).copied().collect();
        self.exchange.wake_waiters(&over);
        Ok(())
    }

    /// Whether threads that also serve other VMs may place pages of a block. Inline placement
    /// waits for QEMU, so a QEMU that hangs would hold up all VMs.
    fn places_late(&self, block: BlockId) -> bool {
        let Recipient { placer, blocks, .. } = &*self.recipient;
        self.exchange.is_of_one || placer.never_waits() || blocks.reaches(block)
    }

    /// Claims what is not here, and answers: at once, or after the rack has been queried.
    fn claim(&self, lane: &Incoming, mut batch: Batch, here: PageSet) -> Result<(), LaneEnd> {
        let question = lane.question();
        let recipient = &self.recipient;
        let lacks = PageSet::all(batch.pages.len()).without(here);
        if !recipient.may_claim(batch.pages.len()) {
            // Its source sends them, as if there were no other provider. Nothing is noted.
            let Batch { header: NamedHeader { block, epoch, .. }, pages, names, .. } = &batch;
            let pages = lacks.of(pages).zip(lacks.of(names));
            self.exchange.wake_waiters(&recipient.displaces(*block, *epoch, pages));
            question.answer(lacks, PageSet::NONE);
            return Ok(());
        }
        let Batch { header: NamedHeader { block, epoch, ticket, .. }, .. } = batch;
        let now = Instant::now();
        let may_wait = batch.header.may_wait && recipient.may_wait() && self.places_late(block);
        batch.may_wait = may_wait;
        // In this order: what waits for the rack's answer is noted as requested before it is
        // answered.
        let unanswered =
            self.claims.as_ref().map_or(PageSet::NONE, |claims| claims.name_again(&batch, lacks));
        let has_asked = recipient.has_asked(block, epoch, &batch.pages, &batch.names);
        let wanted = (unanswered | has_asked) & lacks;
        batch.fates.set_all(wanted, Fate::Requested);
        // Locked until the ticket is open: awaited content may arrive at once.
        let mut tickets = recipient.tickets.lock();
        let mut in_flight = self.exchange.in_flight.lock();
        for nth in lacks.without(wanted).iter() {
            let waits = || batch.waiting(recipient, nth).filter(|_| may_wait).map(Waiter::Page);
            let by = Provider::Vm(recipient.number);
            let fate = match in_flight.claim(batch.names[nth], by, now, waits) {
                Claim::Waits => Fate::Later,
                Claim::Yours => Fate::Ours,
                Claim::OnItsWay => {
                    recipient.waited_in_vain(1);
                    Fate::Requested
                }
            };
            batch.fates.set(nth, fate);
        }
        drop(in_flight);
        let has_ours = !batch.fates.are(Fate::Ours).is_empty();
        let claims = self.claims.as_ref().filter(|_| has_ours);
        let has_places = may_wait && !batch.places.is_empty();
        let disk_readers = self.disk_readers.as_ref().filter(|_| has_ours && has_places);
        let later = batch.fates.are(Fate::Later);
        batch.has_ticket = !later.is_empty() || claims.is_some() || disk_readers.is_some();
        if batch.has_ticket {
            Recipient::open_ticket(&mut tickets, ticket);
            recipient.wait(&mut tickets, ticket, later.len());
        }
        drop(tickets);
        self.place_new(lane, &mut batch)?;
        if let Some(disk_readers) = disk_readers {
            let stored = self.have_read(disk_readers, &batch);
            batch.fates.set_all(stored, Fate::Later);
        }
        match claims.filter(|_| !batch.fates.are(Fate::Ours).is_empty()) {
            Some(claims) => claims.ask(batch, question),
            None => batch.answer(&self.exchange, recipient, question),
        }
        Ok(())
    }

    /// Has disks read for content that no VM here has or gets, and that a disk should have.
    /// Returns which pages those are.
    fn have_read(&self, disk_readers: &DiskReaders, batch: &Batch) -> PageSet {
        let by = (Provider::Vm(self.recipient.number), Provider::Disk(self.recipient.number));
        let now = Instant::now();
        let (mut stored, mut wanted) = (PageSet::NONE, Vec::with_capacity(batch.places.len()));
        let ours = batch.fates.are(Fate::Ours);
        // Locked in this order, as above.
        let mut tickets = self.recipient.tickets.lock();
        let mut in_flight = self.exchange.in_flight.lock();
        for (nth, (name, place)) in batch.names.iter().zip(&batch.places).enumerate() {
            let place = place.filter(|place| ours.has(nth) && disk_readers.has(*place));
            let Some((place, page)) = place.zip(batch.waiting(&self.recipient, nth)) else {
                continue;
            };
            if in_flight.hand_over(name, by, now, Waiter::Page(page)) {
                wanted.push((place, *name));
                stored.insert(nth);
            }
        }
        drop(in_flight);
        self.recipient.wait(&mut tickets, batch.header.ticket, wanted.len());
        drop(tickets);
        disk_readers.want(&mut wanted);
        stored
    }

    /// Gives back memory that is not used. To be called now and then.
    pub fn trim(&self) {
        self.recipient.trim();
    }

    /// The source could send so many of the pages that are awaited from disks.
    pub fn spare(&self, pages: u64) {
        if let Some(disk_readers) = &self.disk_readers {
            disk_readers.spare(pages);
        }
    }

    /// All pages are placed, whether disks have given them or not. Ends the reading of disks, and
    /// waits for no storage.
    pub fn end_reading(&self) {
        if let Some(disk_readers) = &self.disk_readers {
            // The source is not notified of pages that nothing waits for any more.
            self.recipient.end();
            disk_readers.end();
        }
    }

    /// What was placed from disks, and the reads that it took.
    pub fn stored(&self) -> Stored {
        let read = self.disk_readers.as_ref().map(DiskReaders::read).unwrap_or_default();
        Stored { placed_bytes: self.recipient.stored_bytes(), ..read }
    }

    /// Notes on disk reads that did not go as expected.
    pub fn storage_notes(&self) -> Vec<String> {
        self.disk_readers.as_ref().map(DiskReaders::notes).unwrap_or_default()
    }

    /// What came from other hosts of the rack.
    pub fn fetched_bytes(&self) -> u64 {
        self.recipient.fetched_bytes()
    }

    /// What its source sent although another provider had it.
    pub fn again_bytes(&self) -> u64 {
        self.recipient.again_bytes()
    }
}

impl Resolving {
    /// Takes a batch of names from a lane. Places those pages whose content is here, and answers
    /// what happens to the others: at once, or later so that the lane can go on.
    ///
    /// # Errors
    /// If the lane breaks, the source sent what can't be placed, or RAM can't be
    /// written.
    pub fn take(&self, lane: &mut Incoming, header: NamedHeader) -> Result<(), LaneEnd> {
        let mut named = NamedTables::default();
        named.parse(header, lane.read_tables(header.tables_bytes())?)?;
        if !named.fills.is_empty() {
            self.recipient.placer.place_fills(header.block, header.epoch, &named.fills)?;
            self.filled(header.block, header.epoch, &named.fills);
        }
        let NamedTables { pages, names, .. } = &named;
        self.recipient.placer.check(header.block, header.epoch, pages)?;
        let place = |buffer: &mut _| self.place_held(buffer, header, pages, names);
        let here = lane.with_buffer(place)?;
        self.claim(lane, Batch::new(header, named), here)
    }

    /// The source has sent these pages as bytes, and they are placed. They may have been
    /// requested by name on any lane, or have their names with them.
    pub fn came(&self, block: BlockId, epoch: Epoch, Tables { pages, fills, names }: &Tables) {
        let names = self.recipient.came(block, epoch, pages, names);
        self.exchange.wake_waiters(&names);
        if let Some(rack) = &self.exchange.rack
            && self.claims.is_some()
            && !names.is_empty()
        {
            rack.holds(names);
        }
        self.filled(block, epoch, fills);
    }

    /// As [`Resolving::came`], for a VM whose memory can't be read here: those that wait for this
    /// content get it from the `bytes` that came.
    pub fn came_as(&self, block: BlockId, epoch: Epoch, tables: &Tables, bytes: &[u8]) {
        let Tables { pages, fills, .. } = tables;
        let (places, names): (Vec<usize>, Vec<Name>) =
            self.recipient.requested(block, epoch, pages).into_iter().unzip();
        if !names.is_empty() {
            let body = |nth: usize| &bytes[places[nth] * PAGE_BYTES..][..PAGE_BYTES];
            self.exchange.brought(Provider::Vm(self.recipient.number), &names, &body);
        }
        self.filled(block, epoch, fills);
    }

    /// These pages are filled with one byte.
    fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) {
        self.exchange.wake_waiters(&self.recipient.filled(block, epoch, fills));
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        self.recipient.end();
        // They join threads that may hold the exchange for a moment.
        drop(self.claims.take());
        drop(self.disk_readers.take());
        self.exchange.arriving.lock().remove(&self.recipient.number);
    }
}
