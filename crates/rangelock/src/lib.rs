//! A lock over ranges of addresses.
//!
//! Writers of different parts of an address space need not wait for each other,
//! and the parts are not known in advance. So, after PMigrate (section 4.2), a
//! list holds the ranges that are locked now. A locker looks for overlaps
//! there, adds its range if there are none, and removes it afterwards. A
//! short lock guards the list itself, and is never held while a thread waits
//! for a range.
//!
//! PMigrate has a skip list. Here there are as many ranges as threads that place
//! pages of one guest. A scan of eight takes half as long as the levels of a skip
//! list, of thirty as long (docs/benchmarks/parts.md).
//!
//! # Guarantees
//! - No two guards whose ranges overlap exist at the same time.
//! - Requests that overlap are granted in the order they were made. So small
//!   requests can't starve a big one: those that overlap it and come later wait
//!   behind it, even where nothing is locked yet. Requests that overlap nothing
//!   earlier never wait.
//! - A request waits only for earlier ones that overlap it, directly or in a
//!   chain. If every thread holds at most one guard and waits for nothing else
//!   that another locker must provide, no thread waits for ever. A thread that
//!   holds a guard and requests a second one can deadlock, as with any lock; the
//!   lock is not reentrant.
//! - An empty range overlaps nothing.
//!
//! # Why they hold
//! Everything happens under one mutex except a waiting thread's sleep. So the
//! order in which threads get that mutex is the order of requests, and the lock
//! behaves as its single-threaded core ([`turns`]) does when called in that
//! order; tests compare the core with a naive model.
//!
//! A request that can't be granted stores the number of requests ahead of it,
//! which only falls until it is zero. Then the *releasing* thread enters the
//! range as held, still under the mutex, so no third thread can intervene, and
//! the waiting thread has nothing to decide or retry when it wakes.
//!
//! The rest is notification: the releaser stores `true` (release) into the
//! waiter's flag, then unparks it. The waiter stored `false` before it queued
//! under the mutex, and loads the flag (acquire) before every sleep; an unpark
//! before the park makes that park return at once. So no wake-up is lost, and a
//! late one only makes a later wait load its flag once more. Writes made under a
//! guard are visible to the next holder through the mutex or the flag.

#![forbid(unsafe_code)]

mod turns;

use std::fmt;
use std::hint;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};

use parking_lot::Mutex;

use crate::turns::Turns;

/// Loads of the flag before the thread sleeps: about as long as the copy of a
/// few pages. A longer wait is more likely for a whole batch.
const SPINS: usize = 64;

thread_local! {
    /// A thread waits for one range at a time, so one flag is enough and waiting
    /// allocates nothing.
    static GRANTED: Arc<AtomicBool> = Arc::new(AtomicBool::new(false));
}

/// A waiting thread.
struct Waiter {
    granted: Arc<AtomicBool>,
    thread: Thread,
}

impl Waiter {
    fn wake(self) {
        self.granted.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Locks ranges of `u64`; see the crate documentation for its guarantees.
pub struct RangeLock {
    turns: Mutex<Turns<Waiter>>,
}

impl RangeLock {
    /// A lock with no range held.
    #[must_use]
    pub const fn new() -> Self {
        Self { turns: Mutex::new(Turns::new()) }
    }

    /// Locks `range`. Blocks until no overlapping range is held or was requested
    /// earlier.
    pub fn lock(&self, range: Range<u64>) -> Guard<'_> {
        if range.is_empty() {
            return Guard { lock: self, range };
        }
        let mut turns = self.turns.lock();
        if !turns.take(&range) {
            let granted = GRANTED.with(Arc::clone);
            granted.store(false, Ordering::Relaxed);
            let waiter = Waiter { granted: Arc::clone(&granted), thread: thread::current() };
            turns.wait(range.clone(), waiter);
            drop(turns);
            await_turn(&granted);
        }
        Guard { lock: self, range }
    }

    fn give_back(&self, range: &Range<u64>) {
        let mut turns = self.turns.lock();
        turns.give_back(range);
        let mut granted = turns.granted();
        drop(turns);
        // Waking is a system call, so it happens without the mutex.
        while let Some(waiter) = granted {
            waiter.wake();
            granted = self.turns.lock().granted();
        }
    }
}

fn await_turn(granted: &AtomicBool) {
    for _ in 0..SPINS {
        if granted.load(Ordering::Acquire) {
            return;
        }
        hint::spin_loop();
    }
    while !granted.load(Ordering::Acquire) {
        thread::park();
    }
}

impl Default for RangeLock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeLock").finish_non_exhaustive()
    }
}

/// A locked range, unlocked on drop.
#[derive(Debug)]
#[must_use = "the range is unlocked when the guard is dropped"]
pub struct Guard<'l> {
    lock: &'l RangeLock,
    range: Range<u64>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.range.is_empty() {
            self.lock.give_back(&self.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::*;

    impl RangeLock {
        /// Locks `range` if nothing that overlaps it is held or waited for.
        fn try_lock(&self, range: Range<u64>) -> Option<Guard<'_>> {
            let taken = range.is_empty() || self.turns.lock().take(&range);
            taken.then(|| Guard { lock: self, range })
        }
    }

    #[test]
    fn ranges_that_touch_do_not_overlap_and_those_that_share_one_address_do() {
        let lock = RangeLock::new();
        let held = lock.lock(10..20);
        assert!(lock.try_lock(19..30).is_none());
        assert!(lock.try_lock(0..11).is_none());
        assert!(lock.try_lock(12..13).is_none());
        assert!(lock.try_lock(0..100).is_none());
        let (below, above) = (lock.try_lock(0..10).unwrap(), lock.try_lock(20..30).unwrap());
        assert_eq!((&below.range, &above.range), (&(0..10), &(20..30)));
        drop(held);
        assert!(lock.try_lock(10..20).is_some());
    }

    #[test]
    fn an_empty_range_is_always_free() {
        let lock = RangeLock::new();
        let _held = lock.lock(0..100);
        let _empty = lock.lock(50..50);
        assert!(lock.try_lock(7..7).is_some());
    }

    #[test]
    fn a_guard_dropped_by_a_panic_unlocks() {
        let lock = RangeLock::new();
        thread::scope(|scope| {
            let panicking = scope.spawn(|| {
                let _held = lock.lock(0..10);
                panic!("a writer failed");
            });
            assert!(panicking.join().is_err());
        });
        assert!(lock.try_lock(0..10).is_some());
    }

    #[test]
    fn later_small_requests_do_not_overtake_a_big_one() {
        let lock = RangeLock::new();
        let held = lock.lock(0..10);
        thread::scope(|scope| {
            let (said, hear) = mpsc::channel();
            let (lock, big_said) = (&lock, said.clone());
            scope.spawn(move || {
                let big = lock.lock(0..1_000);
                big_said.send("big").unwrap();
                drop(big);
            });
            // 500 is not held, but not free either once the big request waits.
            while lock.try_lock(500..501).is_some() {
                thread::yield_now();
            }
            scope.spawn(move || {
                let _small = lock.lock(500..501);
                said.send("small").unwrap();
            });
            assert!(lock.try_lock(1_000..1_001).is_some());
            assert!(hear.try_recv().is_err());
            drop(held);
            assert_eq!(hear.recv(), Ok("big"));
            assert_eq!(hear.recv(), Ok("small"));
        });
    }

    #[test]
    fn writers_never_meet() {
        const ADDRESSES: u64 = 256;
        const ROUNDS: usize = 4_000;
        let lock = RangeLock::new();
        let owners: Vec<AtomicUsize> = (0..ADDRESSES).map(|_| AtomicUsize::new(0)).collect();
        let writer = |id: usize| {
            let mut dice = 0x2545_f491_4f6c_dd1d_u64.wrapping_mul(id as u64);
            for round in 0..ROUNDS {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                let start = dice % ADDRESSES;
                let longest = if dice >> 60 == 0 { ADDRESSES } else { 16 };
                let end = (start + 1 + (dice >> 20) % longest).min(ADDRESSES);
                let guard = match round % 3 {
                    0 => lock.try_lock(start..end),
                    _ => Some(lock.lock(start..end)),
                };
                let Some(guard) = guard else { continue };
                let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
                for owner in &owners[range.clone()] {
                    assert_eq!(owner.swap(id, Ordering::Relaxed), 0, "two writers in one range");
                }
                if round % 16 == 0 {
                    thread::yield_now();
                }
                for owner in &owners[range] {
                    assert_eq!(owner.swap(0, Ordering::Relaxed), id, "two writers in one range");
                }
                drop(guard);
            }
        };
        thread::scope(|scope| {
            for id in 1..=8 {
                scope.spawn(move || writer(id));
            }
        });
        assert!(lock.try_lock(0..ADDRESSES).is_some());
    }
}
