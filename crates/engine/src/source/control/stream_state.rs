//! State shared by the tap's threads and the sampler of one migration.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use page::{Batch, PAGE_BYTES, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use policy::chase;
use policy::switchover::{BacklogInput, backlog_limit_bytes};

use super::bandwidth::Bandwidth;
use super::hold::Passes;
use super::whole::Whole;
use crate::resources::Pools;

/// Guest bytes by which QEMU can be ahead of the tap, in socket buffers full of records
/// for zero pages.
///
/// A QEMU that decides by its own estimate must never come near the end of its first pass
/// with a full pool behind it, whatever the sockets hide: 208 KiB in the socket and 32 KiB
/// in QEMU are 27,000 classic records of 9 bytes (107 MiB of guest memory). A QEMU that
/// takes a bandwidth (8.2 and newer) is given next to none until the first pass has ended,
/// and does not finish while anything is dirty: for it the margin only drains the pool in
/// time.
pub(crate) const HIDDEN_BYTES: u64 = 128 << 20;
/// The same for a QEMU that takes a bandwidth, and for xl, which writes every page in full, into a
/// pipe of 64 KiB.
pub(crate) const HIDDEN_LITTLE_BYTES: u64 = 4 << 20;

/// The capabilities of this QEMU, or of xl.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    /// Guest bytes by which it can be ahead of the tap: one of the two constants.
    pub(crate) hidden_bytes: u64,
    /// It accepts at least a downtime limit.
    pub(crate) told_limit: bool,
    /// It does not stop the VM before the tap allows it.
    pub(crate) held: bool,
}

pub(crate) struct StreamState {
    pub(crate) pool: Arc<Pool>,
    pub(crate) pool_bytes: u64,
    /// Bytes of buffers with which each path always has something to send.
    least_bytes: AtomicU64,
    traits: Traits,
    /// The pool's bound, written by each thread that may have changed it.
    limit_bytes: Mutex<u64>,
    tapped: Tapped,
    /// Written by the tap's main channel.
    pub(crate) residue_bytes: AtomicU64,
    pub(crate) whole: Whole,
    pub(crate) bandwidth: Bandwidth,
    sampled: Sampled,
    /// Written by the sampler.
    pub(crate) first_pass_over: AtomicBool,
    /// QEMU is held, whatever is left, and its passes chase the guest. Ended by the sampler, and
    /// when the migration is taken back.
    chasing: AtomicBool,
    /// All moving disks have caught up with the guest. Written by the disks' watcher.
    pub(crate) disks_ready: Arc<AtomicBool>,
    /// QEMU reads large holes in its first pass. Written by the prefault thread.
    holes_ahead: AtomicBool,
}

/// Written by the tap's threads.
#[derive(Default)]
struct Tapped {
    ram_bytes: AtomicU64,
    body_bytes: AtomicU64,
    fill_bytes: AtomicU64,
    passes: Passes,
}

/// Written by the sampler.
struct Sampled {
    /// The accepted downtime, in nanoseconds.
    goal_nanos: AtomicU64,
    bodies_per_s: AtomicU64,
    /// Bytes of buffers that keep the path full.
    path_bytes: AtomicU64,
    /// Bytes that lanes can use at once.
    useful_bytes: AtomicU64,
    /// The filter has recently dropped pages.
    dropping: AtomicBool,
    /// The guest's dirty rate is not known yet.
    learning: AtomicBool,
}

impl StreamState {
    /// State for a QEMU with these `traits`.
    pub(crate) fn new(pools: &Pools, goal: Duration, traits: Traits) -> Self {
        let least_bytes = least_bytes(1);
        let pool_bytes = (pools.bound_bytes as u64).max(least_bytes);
        let state = Self {
            pool: Arc::clone(&pools.pages),
            pool_bytes,
            least_bytes: AtomicU64::new(least_bytes),
            traits,
            limit_bytes: Mutex::new(pool_bytes),
            tapped: Tapped::default(),
            residue_bytes: AtomicU64::new(0),
            whole: Whole::default(),
            bandwidth: Bandwidth::default(),
            sampled: Sampled {
                goal_nanos: AtomicU64::new(nanos(goal)),
                bodies_per_s: AtomicU64::new(0),
                path_bytes: AtomicU64::new(0),
                useful_bytes: AtomicU64::new(pool_bytes),
                dropping: AtomicBool::new(false),
                learning: AtomicBool::new(false),
            },
            first_pass_over: AtomicBool::new(false),
            chasing: AtomicBool::new(traits.held),
            disks_ready: Arc::new(AtomicBool::new(true)),
            holes_ahead: AtomicBool::new(false),
        };
        state.adjust_pool();
        state
    }

    /// Sets over how many paths the lanes go.
    pub(crate) fn set_paths(&self, count: usize) {
        self.least_bytes.store(least_bytes(count), Relaxed);
    }

    /// Sets RAM's size, and whether epochs are RAM sections, once the block list is known.
    pub(crate) fn announce_ram(&self, bytes: u64, epoch_by_section: bool) {
        self.tapped.ram_bytes.store(bytes, Relaxed);
        self.tapped.passes.announce(epoch_by_section);
        self.adjust_pool();
    }

    pub(crate) fn ram_bytes(&self) -> u64 {
        self.tapped.ram_bytes.load(Relaxed)
    }

    /// Notes a batch taken from QEMU. The pool's bound follows at once: a sample every 50
    /// ms would be too late for a tap that reads gigabytes a second.
    pub(crate) fn took(&self, batch: &Batch) {
        self.tapped.passes.took(batch, || self.chases());
        let bodies = (batch.bodies().len() * PAGE_BYTES) as u64;
        self.tapped.body_bytes.fetch_add(bodies, Relaxed);
        self.tapped.fill_bytes.fetch_add(batch.guest_bytes() - bodies, Relaxed);
        self.adjust_pool();
    }

    pub(crate) fn taken(&self) -> (u64, u64) {
        (self.tapped.body_bytes.load(Relaxed), self.tapped.fill_bytes.load(Relaxed))
    }

    pub(crate) fn set_bodies_per_s(&self, rate: f64) {
        self.sampled.bodies_per_s.store(rate.to_bits(), Relaxed);
    }

    pub(crate) fn bodies_per_s(&self) -> Option<f64> {
        Some(f64::from_bits(self.sampled.bodies_per_s.load(Relaxed))).filter(|rate| *rate > 0.0)
    }

    /// Sets the bytes of buffers that keep the path full.
    pub(crate) fn set_path_bytes(&self, bytes: u64) {
        self.sampled.path_bytes.store(bytes, Relaxed);
    }

    /// The accepted downtime.
    pub(crate) fn goal(&self) -> Duration {
        Duration::from_nanos(self.sampled.goal_nanos.load(Relaxed))
    }

    /// Accepts a longer downtime.
    pub(crate) fn accept(&self, blackout: Duration) {
        self.sampled.goal_nanos.fetch_max(nanos(blackout), Relaxed);
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        *self.limit_bytes.lock()
    }

    /// The pool's bound without a chase.
    pub(crate) fn bound_bytes(&self) -> u64 {
        let (bodies, fills) = self.taken();
        let first_pass_left_bytes = (!self.first_pass_over.load(Relaxed))
            .then(|| self.ram_bytes().saturating_sub(bodies + fills));
        backlog_limit_bytes(BacklogInput {
            first_pass_left_bytes,
            hidden_bytes: self.traits.hidden_bytes,
            bodies_per_s: self.bodies_per_s(),
            goal: self.goal(),
            counted: self.traits.told_limit,
            pool_bytes: self.pool_bytes,
            least_bytes: self.least_bytes.load(Relaxed),
            path_bytes: self.sampled.path_bytes.load(Relaxed),
        })
    }

    /// Sets the bytes that lanes can use at once while the filter drops nothing.
    pub(crate) fn set_useful_bytes(&self, bytes: u64) {
        let least_bytes = self.least_bytes.load(Relaxed);
        self.sampled.useful_bytes.store(bytes.max(least_bytes), Relaxed);
    }

    /// Sets whether the filter has recently dropped pages: while it does not, a large pool
    /// is of no use.
    pub(crate) fn set_dropping(&self, dropping: bool) {
        self.sampled.dropping.store(dropping, Relaxed);
    }

    /// Notes that QEMU will have nothing to send for a while in its first pass: the pool's
    /// content then keeps the link busy.
    pub(crate) fn expect_holes(&self) {
        self.holes_ahead.store(true, Relaxed);
    }

    /// Sets whether passes should end as soon as possible: they then get the whole pool.
    pub(crate) fn set_learning(&self, learning: bool) {
        self.sampled.learning.store(learning, Relaxed);
    }

    /// Delays QEMU's next pass for `time`; none releases it.
    pub(crate) fn hold(&self, time: Option<Duration>) {
        self.tapped.passes.hold(time);
    }

    /// Whether QEMU's passes are held back for most of the time, so that what is delivered
    /// is what the guest writes. A QEMU that waits for the pool is held back by the path,
    /// however long its pass was held before.
    pub(crate) fn is_paced(&self) -> bool {
        self.chases() && self.tapped.passes.are_paced() && !self.pool.is_used_up()
    }

    /// Whether QEMU waits because the pool is bounded, and not because a chase, or the first pass,
    /// has filled it.
    pub(crate) fn waits_for_bound(&self) -> bool {
        let is_deep = self.sampled.dropping.load(Relaxed) || self.sampled.learning.load(Relaxed);
        let is_filled = !self.first_pass_over.load(Relaxed) || self.chases() && is_deep;
        !is_filled && self.pool.is_used_up()
    }

    /// Time since QEMU's last pass began.
    pub(crate) fn pass_age(&self) -> Duration {
        self.tapped.passes.age()
    }

    /// From now on, data in flight must fit the goal.
    pub(crate) fn end_chase(&self) {
        self.chasing.store(false, Relaxed);
        self.tapped.passes.wake();
    }

    fn chases(&self) -> bool {
        self.chasing.load(Relaxed) && self.first_pass_over.load(Relaxed)
    }

    fn expects_holes(&self) -> bool {
        self.holes_ahead.load(Relaxed) && !self.first_pass_over.load(Relaxed)
    }

    pub(crate) fn adjust_pool(&self) {
        // The lock makes the thread that sets the limit last also the one that computed it
        // last.
        let mut set = self.limit_bytes.lock();
        let dropping = self.sampled.dropping.load(Relaxed);
        let limit = if self.chases() && self.sampled.learning.load(Relaxed) {
            self.pool_bytes
        } else if self.chases() && dropping {
            let least_bytes = self.least_bytes.load(Relaxed);
            chase::pool_bytes(self.bodies_per_s(), least_bytes, self.pool_bytes)
        } else if dropping || self.expects_holes() {
            self.bound_bytes()
        } else {
            // Data that waits longer leaves the processor's caches.
            self.bound_bytes().min(self.sampled.useful_bytes.load(Relaxed))
        };
        if std::mem::replace(&mut *set, limit) != limit {
            self.pool.set_limit_bytes(usize::try_from(limit).unwrap_or(usize::MAX));
        }
    }
}

/// One slot for QEMU's side and one on the wire keep a slow link busy. With two slots for four such
/// links, three of them would wait.
fn least_bytes(paths: usize) -> u64 {
    (1 + paths.max(1) as u64) * SLOT_BYTES as u64
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::Resources;

    #[test]
    fn the_pool_shrinks_as_soon_as_the_tap_has_taken_enough() {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: true, held: false };
        let state = StreamState::new(&pools, Duration::from_millis(300), traits);
        state.announce_ram(8 << 30, false);
        assert_eq!(state.limit_bytes(), pools.bound_bytes as u64);
        let mut batch = state.pool.take().unwrap();
        for page in 0..(8u32 << 18) - 1000 {
            batch.push_fill(page::PageIndex(page), 0);
        }
        state.took(&batch);
        assert_eq!(state.limit_bytes(), 2 * SLOT_BYTES as u64);
    }

    #[test]
    fn the_pool_is_as_deep_as_lanes_can_use_and_deeper_only_where_that_pays() {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_LITTLE_BYTES, told_limit: true, held: true };
        let state = StreamState::new(&pools, Duration::from_millis(300), traits);
        state.announce_ram(8 << 30, false);
        let limit = || {
            state.adjust_pool();
            state.limit_bytes()
        };
        state.set_useful_bytes(12 << 20);
        assert_eq!(limit(), 12 << 20);
        state.set_dropping(true);
        assert_eq!(limit(), pools.bound_bytes as u64, "the filter has something to drop");
        state.set_dropping(false);
        state.set_useful_bytes(0);
        assert_eq!(limit(), 2 * SLOT_BYTES as u64, "never nothing");
        state.set_useful_bytes(u64::MAX);
        assert_eq!(limit(), pools.bound_bytes as u64, "never more than there is");
    }

    #[test]
    fn the_pool_holds_what_keeps_a_long_path_full() {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: false, held: false };
        let state = StreamState::new(&pools, Duration::from_millis(300), traits);
        state.first_pass_over.store(true, Relaxed);
        let least = 2 * SLOT_BYTES as u64;
        for (bodies_per_s, path_bytes) in [(1e6, 0), (10e6, 5 << 20), (20e6, 10 << 20)] {
            state.set_bodies_per_s(bodies_per_s);
            state.set_path_bytes(path_bytes);
            state.adjust_pool();
            assert_eq!(state.limit_bytes(), least + path_bytes);
        }
        state.set_useful_bytes(0);
        state.adjust_pool();
        assert_eq!(state.limit_bytes(), least, "no more than lanes can use");
    }

    #[test]
    fn each_path_has_something_to_send_however_slow_they_are() {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: false, held: false };
        let state = StreamState::new(&pools, Duration::from_millis(300), traits);
        state.first_pass_over.store(true, Relaxed);
        state.set_bodies_per_s(1e6);
        for (paths, slots) in [(0, 2), (1, 2), (4, 5)] {
            state.set_paths(paths);
            state.adjust_pool();
            assert_eq!(state.limit_bytes(), slots * SLOT_BYTES as u64);
        }
    }

    #[test]
    fn a_qemu_that_waits_for_the_pool_is_not_paced() {
        let pools = Resources::new(128 << 20, Vec::new()).leaving(false).unwrap();
        let traits = Traits { hidden_bytes: HIDDEN_LITTLE_BYTES, told_limit: true, held: true };
        let state = StreamState::new(&pools, Duration::from_millis(300), traits);
        state.first_pass_over.store(true, Relaxed);
        let mut batch = state.pool.take().unwrap();
        batch.epoch = page::Epoch(1);
        assert!(!state.is_paced(), "it has not waited yet");
        state.hold(Some(Duration::from_millis(500)));
        state.took(&batch);
        assert!(state.is_paced());
        state.pool.set_limit_bytes(SLOT_BYTES);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| state.pool.take().map(drop));
            while !state.pool.is_used_up() {
                std::thread::yield_now();
            }
            assert!(!state.is_paced(), "the path holds it back");
            assert!(state.waits_for_bound());
            for filled in [&state.sampled.dropping, &state.sampled.learning] {
                filled.store(true, Relaxed);
                assert!(!state.waits_for_bound(), "a chase has filled it");
                filled.store(false, Relaxed);
            }
            state.first_pass_over.store(false, Relaxed);
            assert!(!state.waits_for_bound(), "the first pass has filled it");
            state.first_pass_over.store(true, Relaxed);
            drop(batch);
            waits.join().unwrap().unwrap();
        });
        assert!(state.is_paced() && !state.waits_for_bound());
    }
}
