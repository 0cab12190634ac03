//! What the tap's threads and the sampler of one migration share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use page::{Batch, PAGE_BYTES, Pool, SLOT_BYTES};
use policy::switchover::{BacklogInput, backlog_limit_bytes};

/// Guest bytes that QEMU can be ahead of the tap, in socket buffers full of
/// records for zero pages.
///
/// A QEMU that decides by its own estimate must never be near the end of its
/// first pass with a full pool behind it, whatever the sockets hide: 208 KiB in
/// the socket and 32 KiB in QEMU are 27,000 classic records of 9 bytes (107 MiB
/// of guest). One that is told the bandwidth (8.2 and newer) is told next to
/// none until the first pass is over, and does not finish while anything is
/// dirty: for it the margin only has the pool drained in time.
const HIDDEN_BYTES: u64 = 128 << 20;
const HIDDEN_TOLD_BYTES: u64 = 4 << 20;

pub(crate) struct Live {
    pub(crate) pool: Arc<Pool>,
    pub(crate) pool_bytes: u64,
    pub(crate) goal: Duration,
    hidden_bytes: u64,
    least_bytes: u64,
    limit_bytes: AtomicU64,
    ram_bytes: AtomicU64,
    body_bytes: AtomicU64,
    fill_bytes: AtomicU64,
    pub(crate) residue_bytes: AtomicU64,
    pub(crate) first_pass_over: AtomicBool,
    bodies_per_s: AtomicU64,
}

impl Live {
    pub(crate) fn new(pool_bytes: usize, goal: Duration, told_bandwidth: bool) -> Self {
        // One slot for QEMU's side and one on the wire keep a slow link busy.
        let least_bytes = 2 * SLOT_BYTES as u64;
        let pool_bytes = (pool_bytes as u64).max(least_bytes);
        let live = Self {
            pool: Pool::new(usize::try_from(pool_bytes).unwrap_or(usize::MAX)),
            pool_bytes,
            goal,
            hidden_bytes: if told_bandwidth { HIDDEN_TOLD_BYTES } else { HIDDEN_BYTES },
            least_bytes,
            limit_bytes: AtomicU64::new(pool_bytes),
            ram_bytes: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
            fill_bytes: AtomicU64::new(0),
            residue_bytes: AtomicU64::new(0),
            first_pass_over: AtomicBool::new(false),
            bodies_per_s: AtomicU64::new(0),
        };
        live.adjust_pool();
        live
    }

    /// The block list is known.
    pub(crate) fn announce_ram(&self, bytes: u64) {
        self.ram_bytes.store(bytes, Relaxed);
        self.adjust_pool();
    }

    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram_bytes.load(Relaxed)
    }

    /// A batch was taken from QEMU. The pool's bound follows at once: a sample
    /// every 100 ms would be too late for a tap that takes gigabytes a second.
    pub(crate) fn took(&self, batch: &Batch) {
        let bodies = (batch.bodies().len() * PAGE_BYTES) as u64;
        self.body_bytes.fetch_add(bodies, Relaxed);
        self.fill_bytes.fetch_add(batch.guest_bytes() - bodies, Relaxed);
        self.adjust_pool();
    }

    pub(crate) fn taken(&self) -> (u64, u64) {
        (self.body_bytes.load(Relaxed), self.fill_bytes.load(Relaxed))
    }

    pub(crate) fn set_bodies_per_s(&self, rate: f64) {
        self.bodies_per_s.store(rate.to_bits(), Relaxed);
    }

    pub(crate) fn bodies_per_s(&self) -> Option<f64> {
        Some(f64::from_bits(self.bodies_per_s.load(Relaxed))).filter(|rate| *rate > 0.0)
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    pub(crate) fn adjust_pool(&self) {
        let (bodies, fills) = self.taken();
        let first_pass_left_bytes = (!self.first_pass_over.load(Relaxed))
            .then(|| self.ram_bytes().saturating_sub(bodies + fills));
        let limit = backlog_limit_bytes(BacklogInput {
            first_pass_left_bytes,
            hidden_bytes: self.hidden_bytes,
            bodies_per_s: self.bodies_per_s(),
            goal: self.goal,
            pool_bytes: self.pool_bytes,
            least_bytes: self.least_bytes,
        });
        if self.limit_bytes.swap(limit, Relaxed) != limit {
            self.pool.set_limit_bytes(usize::try_from(limit).unwrap_or(usize::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_shrinks_as_soon_as_the_tap_has_taken_enough() {
        let live = Live::new(128 << 20, Duration::from_millis(300), false);
        live.announce_ram(8 << 30);
        assert_eq!(live.limit_bytes(), 128 << 20);
        let mut batch = live.pool.take().unwrap();
        for page in 0..(8u32 << 18) - 1000 {
            batch.push_fill(page::PageIndex(page), 0);
        }
        live.took(&batch);
        assert_eq!(live.limit_bytes(), 2 * SLOT_BYTES as u64);
    }
}
