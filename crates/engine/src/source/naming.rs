//! The names of pages, for a destination that may have their content already.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use content::Key;
use page::{Batch, BlockId, Epoch, PAGE_BYTES, PageIndex};
use transport::{Asking, Labels, Namer};
use wire::{DiskPlace, ToDestination};

use super::guest_page_cache::GuestPageCache;
use super::stale_filter::StaleFilter;
use super::stream_state::StreamState;
use crate::link::Link;

/// Lanes should have this much to send of what disks are read for: what they
/// deliver in so many seconds, and as pages at least and at most.
const SPARE_S: f64 = 0.1;
const SPARE_MIN: u64 = 256;
const SPARE_MAX: u64 = 1 << 14;

/// Names what QEMU hands over in its first pass. What comes later has been written
/// since: it is like nothing else, or soon not any more.
pub(super) struct Naming {
    pub(super) key: Key,
    /// Content is shared: all pages have names.
    pub(super) shares: bool,
    /// What disks have that the destination reads, by their numbers.
    pub(super) cached: Option<(Arc<GuestPageCache>, Vec<bool>)>,
    pub(super) link: Arc<Link<ToDestination>>,
    pub(super) state: Arc<StreamState>,
    pub(super) stale_filter: Arc<StaleFilter>,
    /// How much disks bring is not to be found out.
    pub(super) is_fixed: bool,
    /// QEMU is held until all is there: the destination may wait for content.
    pub(super) held: bool,
}

impl std::fmt::Debug for Naming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Naming").field("held", &self.held).finish_non_exhaustive()
    }
}

impl Naming {
    /// The block list is known.
    pub(super) fn announce(&self, blocks: &[tap::Block]) {
        if let Some((cached, _)) = &self.cached {
            cached.announce(blocks);
        }
    }

    /// QEMU hands this over. What it says once more goes no further: lanes and their
    /// pool are for what has to be sent.
    pub(super) fn hand_over(&self, batch: &mut Batch) {
        if let Some((cached, _)) = &self.cached {
            cached.hand_over(batch);
            self.take_out_announced(batch);
        }
    }

    /// All that is older has been handed over.
    pub(super) fn all_before(&self, epoch: Epoch) {
        if let Some((cached, _)) = &self.cached {
            cached.all_before(epoch);
        }
    }

    /// Whether the destination reads this disk, and may wait for it.
    pub(super) fn reads(&self, disk: u16) -> bool {
        let cached = self.cached.as_ref().filter(|_| self.held);
        cached.is_some_and(|(_, readable)| is_read(readable, disk))
    }

    /// Where disks have the bodies of a batch: a place for each, or none at all.
    /// Returns which have one, by bits.
    fn find(&self, batch: &Batch, may_wait: bool, places: &mut Vec<Option<DiskPlace>>) -> u128 {
        let Some((cached, readable)) = self.cached.as_ref().filter(|_| may_wait) else { return 0 };
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

impl Namer for Naming {
    fn take_out_announced(&self, batch: &mut Batch) -> usize {
        let Some((cached, _)) = &self.cached else { return 0 };
        // An older one that comes later would count as the first.
        if !cached.has_all_before(batch.epoch) {
            return 0;
        }
        let Some(mut known) = cached.of(batch.block) else { return 0 };
        let pages: Vec<PageIndex> = batch.bodies().iter().map(|body| body.page).collect();
        batch.retain_bodies(|nth, bytes| {
            known.has(pages[nth]).is_none_or(|name| self.key.name(bytes) != name)
        })
    }

    fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking {
        if self.state.first_pass_over.load(Relaxed) {
            return Asking::No;
        }
        let may_wait = self.held && self.stale_filter.reaches(batch.block);
        let on_disk = self.find(batch, may_wait, &mut labels.places);
        if !self.shares {
            labels.places.retain(Option::is_some);
        }
        let bodies = batch.bodies().iter().enumerate();
        let named = bodies.filter(|(nth, _)| self.shares || on_disk >> nth & 1 == 1);
        labels.names.extend(named.map(|(_, body)| self.key.name(batch.bytes_of(*body))));
        match (self.shares, may_wait) {
            (true, true) => Asking::MayWait,
            (true, false) => Asking::Now,
            (false, _) => Asking::Only(on_disk),
        }
    }

    fn spare_pages(&self) -> u64 {
        if self.is_fixed {
            return 0;
        }
        let pages_per_s = self.state.bodies_per_s().unwrap_or(0.0) / PAGE_BYTES as f64;
        // A rate is never below 0.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let pages = (pages_per_s * SPARE_S) as u64;
        pages.clamp(SPARE_MIN, SPARE_MAX)
    }

    fn has_spare(&self, pages: u64) {
        // Who leads the migration sees by other ways that it is over.
        let _ = self.link.say(&ToDestination::Spare { pages });
    }

    fn read_again(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        let known = self.cached.as_ref().and_then(|(cached, _)| cached.of(block));
        let Some(mut known) = known else { return self.stale_filter.read(block, pages, into) };
        let reading: Vec<_> = pages.iter().map(|page| known.begin_to_read(*page)).collect();
        if !self.stale_filter.read(block, pages, into) {
            return false;
        }
        for (reading, bytes) in reading.into_iter().zip(into.chunks_exact(PAGE_BYTES)) {
            if let Some(reading) = reading.filter(|one| self.key.name(bytes) == one.name) {
                known.is_as_told(&reading);
            }
        }
        true
    }
}
