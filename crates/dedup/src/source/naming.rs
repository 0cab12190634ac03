//! The names of pages, for a destination that may have their content already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use audit::HandedOver;
use content::{Key, Name};
use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex};
use ram::Numbered;
use wire::{Announced, DiskPlace};

use super::guest_page_cache::GuestPageCache;

/// Lanes should have this much to send of what disks are read for: what they
/// deliver in so many seconds, and as pages at least and at most.
const SPARE_S: f64 = 0.1;
const SPARE_MIN: u64 = 256;
const SPARE_MAX: u64 = 1 << 14;

/// Names of bodies.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// One for each.
    pub(super) names: Vec<Name>,
    /// Where disks have their content: one for each, or none at all.
    pub(super) places: Vec<Option<DiskPlace>>,
}

impl Labels {
    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.places.clear();
    }
}

/// Whether the destination is asked for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asking {
    /// It is not: its bodies go at once.
    No,
    /// It is, for all of them.
    All,
    /// It is, for bodies with these bits, which can be had again: their buffers
    /// are not kept for it. The others go at once.
    Only(u128),
}

/// What a migration names, and by what.
#[derive(Debug)]
pub struct Plan {
    /// What names are made with.
    pub key: Key,
    /// Content is shared: all pages have names.
    pub shares: bool,
    /// What disks have that the destination reads, by their numbers.
    pub cached: Option<(Arc<GuestPageCache>, Vec<bool>)>,
    /// The source's RAM.
    pub ram: Arc<Numbered>,
    /// Where it is noted what is read of that once more.
    pub handed_over: Arc<HandedOver>,
    /// Not yet: the destination says when.
    pub sleeps: bool,
    /// How much disks bring is not to be found out.
    pub is_fixed: bool,
    /// Whether the destination may wait for content.
    pub waits: Waits,
}

/// How long a destination may wait for content from another VM, host or disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It may not: what it lacks is sent at once.
    Never,
    /// In QEMU's first pass. Bodies are kept meanwhile, and sent when that is over.
    FirstPass,
    /// As long as it likes: QEMU is held until all is there.
    Held,
}

/// Names what QEMU hands over in its first pass. What comes later has been written
/// since: it is like nothing else, or soon not any more.
#[derive(Debug)]
pub struct Naming {
    plan: Plan,
    sleeps: AtomicBool,
    first_pass_over: AtomicBool,
    /// As bits; 0 while it is not known.
    bodies_per_s: AtomicU64,
}

impl Naming {
    /// Before QEMU hands anything over.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        Self {
            sleeps: AtomicBool::new(plan.sleeps),
            plan,
            first_pass_over: AtomicBool::new(false),
            bodies_per_s: AtomicU64::new(0),
        }
    }

    #[cfg(test)]
    pub(super) fn into_plan(self) -> Plan {
        self.plan
    }

    /// There may be something to find by now.
    pub fn wake(&self) {
        self.sleeps.store(false, Relaxed);
    }

    fn shares(&self) -> bool {
        self.plan.shares && !self.sleeps.load(Relaxed)
    }

    /// Whether the destination is asked for pages.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.shares() || self.plan.cached.is_some()
    }

    pub(super) fn waits(&self) -> Waits {
        self.plan.waits
    }

    /// Whether the destination may wait for content of a block.
    pub(super) fn may_wait(&self, block: BlockId) -> bool {
        match self.plan.waits {
            Waits::Never => false,
            Waits::FirstPass => true,
            Waits::Held => self.plan.ram.reaches(block),
        }
    }

    /// Whether bodies of a block are kept while the destination waits for their content:
    /// they can't be read again, or there may be no time for it.
    pub(super) fn keeps(&self, block: BlockId) -> bool {
        self.plan.waits != Waits::Held || !self.plan.ram.reaches(block)
    }

    /// Nothing is named any more.
    pub(super) fn end_first_pass(&self) {
        self.first_pass_over.store(true, Relaxed);
    }

    pub(super) fn is_first_pass_over(&self) -> bool {
        self.first_pass_over.load(Relaxed)
    }

    /// Lanes deliver so many bytes of bodies a second.
    pub fn set_bodies_per_s(&self, rate: f64) {
        self.bodies_per_s.store(rate.to_bits(), Relaxed);
    }

    /// What disks have that the destination reads.
    pub(super) fn cached(&self) -> Option<&Arc<GuestPageCache>> {
        self.plan.cached.as_ref().map(|(cached, _)| cached)
    }

    pub(super) fn key(&self) -> &Key {
        &self.plan.key
    }

    /// The block list is known.
    pub fn announce(&self, blocks: &[Announced]) {
        if let Some((cached, _)) = &self.plan.cached {
            cached.announce(blocks);
        }
    }

    /// QEMU hands this over. What it says once more goes no further: lanes and their
    /// pool are for what has to be sent.
    pub fn hand_over(&self, batch: &mut Batch) {
        if let Some((cached, _)) = &self.plan.cached {
            cached.hand_over(batch);
            self.take_out_announced(batch);
        }
    }

    /// All that is older has been handed over.
    pub fn all_before(&self, epoch: Epoch) {
        if let Some((cached, _)) = &self.plan.cached {
            cached.all_before(epoch);
        }
    }

    /// Whether the destination reads this disk, and may wait for it.
    pub(super) fn reads(&self, disk: u16) -> bool {
        let cached = self.plan.cached.as_ref().filter(|_| self.plan.waits == Waits::Held);
        cached.is_some_and(|(_, readable)| is_read(readable, disk))
    }

    /// Where disks have the bodies of a batch: a place for each, or none at all.
    /// Returns which have one, by bits.
    fn find(&self, batch: &Batch, places: &mut Vec<Option<DiskPlace>>) -> u128 {
        let Some((cached, readable)) = &self.plan.cached else { return 0 };
        let Some(mut known) = cached.of(batch.block) else { return 0 };
        let mut found = 0;
        places.extend(batch.bodies().iter().enumerate().map(|(nth, body)| {
            let page = known.find(body.page).filter(|page| is_read(readable, page.place.disk))?;
            // What was told ahead, and has changed since, no disk has.
            if known.told(page).is_some() {
                return None;
            }
            found |= 1 << nth;
            Some(page.place)
        }));
        if found == 0 {
            places.clear();
        }
        found
    }
}

fn is_read(readable: &[bool], disk: u16) -> bool {
    readable.get(usize::from(disk)) == Some(&true)
}

impl Naming {
    /// Takes out bodies that were announced to the destination and have not changed
    /// since. Says how many.
    pub(super) fn take_out_announced(&self, batch: &mut Batch) -> usize {
        let Some((cached, _)) = &self.plan.cached else { return 0 };
        // An older one that comes later would count as the first.
        if !cached.has_all_before(batch.epoch) {
            return 0;
        }
        let Some(mut known) = cached.of(batch.block) else { return 0 };
        let pages: Vec<PageIndex> = batch.bodies().iter().map(|body| body.page).collect();
        batch.retain_bodies(|nth, bytes| {
            known.has(pages[nth]).is_none_or(|name| self.plan.key.name(bytes) != name)
        })
    }

    /// Names the bodies of a batch that are to go by name, in their order, into empty
    /// `labels`.
    pub(super) fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking {
        if self.is_first_pass_over() {
            return Asking::No;
        }
        let may_wait = self.may_wait(batch.block);
        let on_disk = if may_wait { self.find(batch, &mut labels.places) } else { 0 };
        let shares = self.shares();
        if on_disk == 0 && !shares {
            return Asking::No;
        }
        // What is kept is so as a whole.
        let all = shares || self.keeps(batch.block);
        if !all {
            labels.places.retain(Option::is_some);
        }
        let bodies = batch.bodies().iter().enumerate();
        let named = bodies.filter(|(nth, _)| all || on_disk >> nth & 1 == 1);
        labels.names.extend(named.map(|(_, body)| self.plan.key.name(batch.bytes_of(*body))));
        if all { Asking::All } else { Asking::Only(on_disk) }
    }

    /// How many of the pages that the destination waits for lanes should have to send,
    /// once they have little else.
    pub(super) fn spare_pages(&self) -> u64 {
        if self.plan.is_fixed {
            return 0;
        }
        let pages_per_s = f64::from_bits(self.bodies_per_s.load(Relaxed)) / PAGE_BYTES as f64;
        // A rate is never below 0.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let pages = (pages_per_s * SPARE_S) as u64;
        pages.clamp(SPARE_MIN, SPARE_MAX)
    }

    /// Reads what pages of a block contain by now, one after the other, to be sent. False
    /// if that can't be had any more.
    pub(super) fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        let mut known = self.plan.cached.as_ref().and_then(|(cached, _)| cached.of(block));
        let reading: Vec<_> =
            pages.iter().map(|page| known.as_mut()?.begin_to_read(*page)).collect();
        // After that: a page that is not noted yet is not left out when QEMU comes to it.
        let ledger = self.plan.handed_over.block(block);
        let rereading = ledger.map(|ledger| ledger.begin_to_reread(pages));
        if !self.read(block, pages, into) {
            return false;
        }
        if let Some(rereading) = rereading {
            rereading.note(into);
        }
        for (reading, bytes) in reading.iter().zip(into.chunks_exact(PAGE_BYTES)) {
            if let (Some(known), Some(reading)) = (&known, reading)
                && self.plan.key.name(bytes) == reading.name
            {
                known.is_as_told(reading);
            }
        }
        true
    }

    /// What pages contain now. False if that can't be had.
    pub(super) fn read(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        self.plan.ram.read(block, pages.iter().copied(), into)
    }
}
