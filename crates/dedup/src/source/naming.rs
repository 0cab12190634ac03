//! Names pages for a destination that may have their content already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use audit::HandedOver;
use content::{Key, Name};
use page::{Batch, BlockId, Body, Epoch, PAGE_BYTES, PageIndex, PageSet};
use ram::Numbered;
use wire::{Announced, DiskLocation, Names};

use super::finds::Finds;
use super::first_pass::FirstPass;
use super::guest_page_cache::GuestPageCache;
use super::named_before::{NamedBefore, Namer};

/// How many of the pages awaited from disks lanes should have queued: what they deliver in so
/// many seconds, between a minimum and a maximum of pages.
const SPARE_S: f64 = 0.1;
const SPARE_MIN: u64 = 256;
const SPARE_MAX: u64 = 1 << 14;

/// The names of a batch's bodies.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// One for each body.
    pub(super) names: Vec<Name>,
    /// Where disks have the content: one for each body, or none at all.
    pub(super) places: Vec<Option<DiskLocation>>,
}

impl Labels {
    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.places.clear();
    }

    /// Their message, without fills, for pages whose bodies can be read again.
    pub(super) fn message(&self, block: BlockId, epoch: Epoch, ticket: u32) -> Names<'_> {
        let Self { names, places } = self;
        Names { block, epoch, ticket, may_wait: true, names, places, fills: &[] }
    }
}

/// Which bodies of a batch are queried by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offered {
    /// None: the bodies are sent at once.
    No,
    /// None: the bodies are sent at once, with their names, by which other VMs may find them.
    Along,
    /// All of them.
    All,
    /// These, which can be read again, so their buffers are not kept. The others are sent at once.
    Only(PageSet),
}

/// What a migration names, and how.
#[derive(Debug)]
pub struct Plan {
    /// The key that names are made with.
    pub key: Key,
    /// Names that were made with this key before the migration.
    pub before: Option<NamedBefore>,
    /// Whether content is shared, so that all pages are named.
    pub shares: bool,
    /// Whether the destination accepts names with bodies.
    pub names_with_bodies: bool,
    /// The only block whose pages go by name; none if those of all blocks do.
    pub only: Option<BlockId>,
    /// Pages on disks, and by number which disks the destination reads.
    pub cached: Option<(Arc<GuestPageCache>, Vec<bool>)>,
    /// The source's RAM.
    pub ram: Arc<Numbered>,
    /// Where reread pages are noted for the audit.
    pub handed_over: Arc<HandedOver>,
    /// Whether naming starts only when the destination says so.
    pub sleeps: bool,
    /// Whether the amount that disks provide is fixed, and not adapted to the lanes' speed.
    pub is_fixed: bool,
    /// Whether the destination may wait for content.
    pub waits: Waits,
}

/// How long a destination may wait for content from another VM, host or disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It may not: what it lacks is sent at once.
    Never,
    /// In QEMU's first pass. Bodies are kept until then, and what is still awaited is sent when
    /// it ends.
    FirstPass,
    /// The same. What is left of the first pass then is still named, and not waited for: passes
    /// follow in which the VM runs, and it may be all in buffers by then.
    WhileBuffered,
    /// Without a limit: QEMU is held until all has arrived.
    Held,
}

/// Names the pages of QEMU's first pass, also those that a lane takes after it has ended. Pages of
/// later passes have been written since, so they have few or no equals, or soon change again.
#[derive(Debug)]
pub struct Naming {
    plan: Plan,
    sleeps: AtomicBool,
    first_pass: FirstPass,
    has_ended: AtomicBool,
    finds: Finds,
    /// An `f64`'s bits; 0 while unknown.
    bodies_per_s: AtomicU64,
}

impl Naming {
    /// A naming for a migration that has not begun.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        Self {
            sleeps: AtomicBool::new(plan.sleeps),
            plan,
            first_pass: FirstPass::default(),
            has_ended: AtomicBool::new(false),
            finds: Finds::default(),
            bodies_per_s: AtomicU64::new(0),
        }
    }

    #[cfg(test)]
    pub(super) fn into_plan(self) -> Plan {
        self.plan
    }

    /// The destination may have content by now.
    pub fn wake(&self) {
        self.sleeps.store(false, Relaxed);
    }

    fn shares(&self) -> bool {
        self.plan.shares && !self.sleeps.load(Relaxed)
    }

    /// Whether the destination reads pages from disks.
    #[must_use]
    pub fn reads_disks(&self) -> bool {
        self.plan.cached.is_some()
    }

    /// Whether the destination is queried at all.
    #[must_use]
    pub fn queries(&self) -> bool {
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
            Waits::WhileBuffered => !self.first_pass.is_over(),
            Waits::Held => self.plan.ram.reaches(block),
        }
    }

    /// Whether bodies of a block are kept while the destination waits for their content:
    /// they can't be read again, or there may be no time for it.
    pub(super) fn keeps(&self, block: BlockId) -> bool {
        self.plan.waits != Waits::Held || !self.plan.ram.reaches(block)
    }

    /// QEMU's next pass has started.
    pub(super) fn end_first_pass(&self) {
        self.first_pass.end();
    }

    pub(super) fn is_first_pass_over(&self) -> bool {
        self.has_ended() || self.first_pass.is_over()
    }

    /// Names nothing from now on.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Relaxed);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Relaxed)
    }

    /// Whether pages of this block and epoch go by name.
    pub(super) fn names(&self, block: BlockId, epoch: Epoch) -> bool {
        let is_named = self.plan.only.is_none_or(|only| only == block);
        is_named && !self.has_ended() && self.first_pass.has(epoch)
    }

    /// Sets how many bytes of bodies lanes deliver a second.
    pub fn set_bodies_per_s(&self, rate: f64) {
        self.bodies_per_s.store(rate.to_bits(), Relaxed);
    }

    /// Pages on disks that the destination reads.
    pub(super) fn cached(&self) -> Option<&Arc<GuestPageCache>> {
        self.plan.cached.as_ref().map(|(cached, _)| cached)
    }

    /// Names pages of this block.
    pub(super) fn namer(&self, block: BlockId) -> Namer<'_> {
        Namer::new(&self.plan.key, self.plan.before.as_ref(), block)
    }

    /// Of the bodies that went by name, those that were not hashed, because they had their names
    /// from before the migration.
    #[must_use]
    pub fn named_before_bytes(&self) -> u64 {
        let pages = self.plan.before.as_ref().map_or(0, NamedBefore::used);
        pages * PAGE_BYTES as u64
    }

    /// The block list is known, and whether epochs are RAM sections.
    pub fn announce(&self, blocks: &[Announced], epoch_by_section: bool) {
        self.first_pass.announce(epoch_by_section);
        if let Some(before) = &self.plan.before {
            before.announce(blocks);
        }
        if let Some((cached, _)) = &self.plan.cached {
            cached.announce(blocks);
        }
    }

    /// QEMU hands this batch over. Pages that were announced and have not changed are dropped
    /// here: lanes and their pool are for what has to be sent.
    pub fn hand_over(&self, batch: &mut Batch) {
        self.first_pass.took(batch.epoch);
        if let Some((cached, _)) = &self.plan.cached {
            cached.hand_over(batch);
            self.take_out_announced(batch);
        }
    }

    /// Everything older has been handed over.
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

    /// Where disks have the bodies of a batch: a place for each, or none at all. Returns which
    /// bodies have one.
    fn find(&self, batch: &Batch, places: &mut Vec<Option<DiskLocation>>) -> PageSet {
        let mut found = PageSet::NONE;
        let Some((cached, readable)) = &self.plan.cached else { return found };
        let Some(mut known) = cached.of(batch.block) else { return found };
        places.extend(batch.bodies().iter().enumerate().map(|(nth, body)| {
            let page = known.find(body.page).filter(|page| is_read(readable, page.place.disk))?;
            // A page that was announced and has changed since is on no disk.
            if known.told(page).is_some() {
                return None;
            }
            found.insert(nth);
            Some(page.place)
        }));
        if found.is_empty() {
            places.clear();
        }
        found
    }
}

fn is_read(readable: &[bool], disk: u16) -> bool {
    readable.get(usize::from(disk)) == Some(&true)
}

impl Naming {
    /// Removes bodies that were announced to the destination and have not changed since. Returns
    /// how many.
    pub(super) fn take_out_announced(&self, batch: &mut Batch) -> usize {
        let Some((cached, _)) = &self.plan.cached else { return 0 };
        // An older batch that arrives later would be taken for the first.
        if !cached.has_all_before(batch.epoch) {
            return 0;
        }
        let Some(mut known) = cached.of(batch.block) else { return 0 };
        let pages: Vec<PageIndex> = batch.bodies().iter().map(|body| body.page).collect();
        let mut namer = self.namer(batch.block);
        batch.retain_bodies(|nth, bytes| {
            known.has(pages[nth]).is_none_or(|name| namer.name(pages[nth], bytes) != name)
        })
    }

    /// Names the bodies of a batch that are to go by name, in order, into empty `labels`.
    pub(super) fn name(&self, batch: &Batch, labels: &mut Labels) -> Offered {
        if !self.names(batch.block, batch.epoch) {
            return Offered::No;
        }
        let may_wait = self.may_wait(batch.block);
        let on_disk = if may_wait { self.find(batch, &mut labels.places) } else { PageSet::NONE };
        let shares = self.shares();
        if on_disk.is_empty() && !shares {
            return Offered::No;
        }
        // A batch is kept as a whole.
        let all = shares || self.keeps(batch.block);
        if !all {
            labels.places.retain(Option::is_some);
        }
        let bodies = batch.bodies().iter().enumerate();
        let named = bodies.filter(|(nth, _)| all || on_disk.has(*nth));
        let mut namer = self.namer(batch.block);
        let name = |body: &Body| namer.name(body.page, batch.bytes_of(*body));
        labels.names.extend(named.map(|(_, body)| body).map(name));
        namer.count();
        if !all {
            return Offered::Only(on_disk);
        }
        let may_go_along = self.plan.names_with_bodies && on_disk.is_empty();
        if may_go_along && !self.finds.are_likely() { Offered::Along } else { Offered::All }
    }

    /// Of so many pages that were looked up, the destination found these.
    pub(super) fn found(&self, found: usize, of: usize) {
        self.finds.found(found, of);
    }

    /// How many of the pages that the destination awaits lanes should have queued, once they have
    /// little else.
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

    /// Reads the current content of a block's pages, to be sent. False if that is not possible
    /// any more.
    pub(super) fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        let mut known = self.plan.cached.as_ref().and_then(|(cached, _)| cached.of(block));
        let reading: Vec<_> =
            pages.iter().map(|page| known.as_mut()?.begin_to_read(*page)).collect();
        // Only after `begin_to_read`, which has QEMU's copy of a page sent: so a page that QEMU
        // hands over from here on, and that the ledger doesn't have yet, is not left out.
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

    /// Reads the current content of pages. False if that is not possible.
    pub(super) fn read(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        self.plan.ram.read(block, pages.iter().copied(), into)
    }
}

#[cfg(test)]
mod tests {
    use page::Pool;

    use super::super::named_before::tests::scanned;
    use super::super::stage::tests::naming;
    use super::*;

    #[test]
    fn a_body_has_its_earlier_name_if_it_has_not_changed() {
        let mut plan = naming(Waits::Held).into_plan();
        plan.before = Some(scanned(&plan.key));
        let (key, naming, pool) = (plan.key.clone(), Naming::new(plan), Pool::new(1 << 20));
        let bytes = 8 * PAGE_BYTES as u64;
        naming.announce(&[Announced { name: "ram".to_owned(), bytes }], false);
        let mut batch = pool.take().unwrap();
        batch.epoch = Epoch(2);
        for (nth, (page, byte)) in [(5, 7), (6, 9), (7, 7)].into_iter().enumerate() {
            let at = nth * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].fill(byte);
            batch.push_body(PageIndex(page), at);
        }
        naming.hand_over(&mut batch);
        let mut labels = Labels::default();
        assert_eq!(naming.name(&batch, &mut labels), Offered::All);
        assert_eq!(labels.names, [7, 9, 7].map(|byte| key.name(&[byte; PAGE_BYTES])));
        assert_eq!(naming.named_before_bytes(), PAGE_BYTES as u64, "two have changed since");
    }

    #[test]
    fn where_nothing_is_found_names_go_with_bodies_if_the_destination_accepts_them() {
        for (accepts, expected) in [(true, Offered::Along), (false, Offered::All)] {
            let mut plan = naming(Waits::Held).into_plan();
            plan.names_with_bodies = accepts;
            let (naming, pool) = (Naming::new(plan), Pool::new(1 << 20));
            naming.announce(&[], false);
            let mut batch = pool.take().unwrap();
            batch.push_body(PageIndex(0), 0);
            let offered = || naming.name(&batch, &mut Labels::default());
            assert_eq!(offered(), Offered::All);
            naming.found(0, 1 << 20);
            let all: Vec<Offered> = (0..8).map(|_| offered()).collect();
            assert_eq!((all[0], &all[1..]), (Offered::All, &[expected; 7][..]));
            naming.found(1, 1);
            assert_eq!(offered(), Offered::All);
        }
    }

    #[test]
    fn other_blocks_than_the_only_one_are_sent() {
        let mut plan = naming(Waits::WhileBuffered).into_plan();
        plan.only = Some(BlockId(1));
        let (naming, pool) = (Naming::new(plan), Pool::new(1 << 20));
        naming.announce(&[], false);
        let asks = |block| {
            let mut batch = pool.take().unwrap();
            batch.push_body(PageIndex(0), 0);
            (batch.block, batch.epoch) = (BlockId(block), Epoch(1));
            naming.hand_over(&mut batch);
            naming.name(&batch, &mut Labels::default())
        };
        assert_eq!([0, 1, 2].map(asks), [Offered::No, Offered::All, Offered::No]);
        assert!(naming.may_wait(BlockId(1)));
        naming.end_first_pass();
        assert_eq!(asks(1), Offered::All, "it is left of the first pass");
        assert!(!naming.may_wait(BlockId(1)));
    }

    #[test]
    fn what_is_left_of_the_first_pass_goes_by_name_and_nothing_later() {
        let (naming, pool) = (naming(Waits::Held), Pool::new(1 << 20));
        naming.announce(&[], false);
        let batch = |epoch| {
            let mut batch = pool.take().unwrap();
            batch.push_body(PageIndex(0), 0);
            batch.epoch = Epoch(epoch);
            batch
        };
        let asks = |epoch| naming.name(&batch(epoch), &mut Labels::default());
        for epoch in [2, 2, 3] {
            naming.hand_over(&mut batch(epoch));
        }
        assert_eq!([2, 3].map(asks), [Offered::All; 2]);
        naming.end_first_pass();
        assert_eq!([2, 3].map(asks), [Offered::All, Offered::No]);
        naming.end();
        assert_eq!([2, 3].map(asks), [Offered::No; 2]);
    }
}
