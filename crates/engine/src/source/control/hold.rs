//! Paces QEMU's passes while a guest is chased.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use page::{Batch, PAGE_BYTES};
use parking_lot::{Condvar, Mutex};

/// Least interval between passes: each one costs the guest a fault per page that it
/// writes again.
const PASS_LEAST: Duration = Duration::from_millis(100);
/// An epoch of this length is worth its cost. With the classic stream, and with
/// machine types up to 8.0, an epoch is one RAM section, which QEMU ends after 50 ms
/// even if there is more: the next one must not wait.
const EPOCH_LONG: Duration = Duration::from_millis(40);
/// After a wait of this length, QEMU was kept from sending for at least half of the interval.
const WAIT_LONG: Duration = Duration::from_millis(50);
/// QEMU checks the clock after this many pages: a RAM section with fewer ended
/// because nothing was dirty any more.
const SECTION_PAGES: u64 = 64;

/// The epochs that the tap's threads have seen.
pub(crate) struct Passes {
    /// Epochs are RAM sections.
    sectioned: AtomicBool,
    epoch: AtomicU32,
    /// Pages in this epoch so far.
    pages: AtomicU64,
    began: Mutex<Began>,
    wake: Condvar,
}

#[derive(Clone, Copy, Debug)]
struct Began {
    at: Instant,
    /// It was held back, which alone may have ended QEMU's section.
    late: bool,
    /// For how long it was held back.
    waited: Duration,
    /// The next epoch does not begin before this.
    held_until: Option<Instant>,
}

impl Began {
    /// The time when the next epoch may begin, if not now.
    fn next(self, now: Instant, sectioned: bool, pages: u64) -> Option<Instant> {
        let may_go_on = sectioned && self.late && pages >= SECTION_PAGES;
        (now - self.at < EPOCH_LONG && !may_go_on).then(|| self.at + PASS_LEAST)
    }
}

impl Default for Passes {
    fn default() -> Self {
        Self {
            sectioned: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            pages: AtomicU64::new(0),
            began: Mutex::new(Began {
                at: Instant::now(),
                late: false,
                waited: Duration::ZERO,
                held_until: None,
            }),
            wake: Condvar::new(),
        }
    }
}

impl Passes {
    /// Sets whether epochs are RAM sections, as the stream's head shows.
    pub(crate) fn announce(&self, sectioned: bool) {
        self.sectioned.store(sectioned, Relaxed);
    }

    /// Wakes waiting threads after pacing was switched on or off.
    pub(crate) fn wake(&self) {
        let _began = self.began.lock();
        self.wake.notify_all();
    }

    /// Delays the next epoch for `time`, if passes are paced: a pass now would send
    /// pages that have to be sent again. None releases it.
    pub(crate) fn hold(&self, time: Option<Duration>) {
        let mut began = self.began.lock();
        began.held_until = time.map(|time| Instant::now() + time);
        if time.is_none() {
            self.wake.notify_all();
        }
    }

    /// Time since the last epoch began.
    pub(crate) fn age(&self) -> Duration {
        self.began.lock().at.elapsed()
    }

    /// Whether the current epoch was held back for so long that QEMU could send much more
    /// than it may.
    pub(crate) fn are_paced(&self) -> bool {
        self.began.lock().waited >= WAIT_LONG
    }

    /// Holds the first batches of an epoch while the last one is too young, or the
    /// next is held, if passes are `paced`.
    pub(crate) fn took(&self, batch: &Batch, paced: impl Fn() -> bool) {
        let epoch = batch.epoch.0;
        let pages = batch.guest_bytes() / PAGE_BYTES as u64;
        let is_new = || epoch > self.epoch.load(Relaxed);
        if !is_new() {
            self.pages.fetch_add(pages, Relaxed);
            return;
        }
        let mut began = self.began.lock();
        let (mut late, came) = (false, Instant::now());
        let sectioned = self.sectioned.load(Relaxed);
        let soonest = began.next(came, sectioned, self.pages.load(Relaxed));
        while is_new() && paced() {
            let until = soonest.max(began.held_until);
            let Some(until) = until.filter(|until| *until > Instant::now()) else { break };
            late = true;
            self.wake.wait_until(&mut began, until);
        }
        if is_new() {
            self.epoch.store(epoch, Relaxed);
            self.pages.store(pages, Relaxed);
            let at = Instant::now();
            let waited = if late { at - came } else { Duration::ZERO };
            *began = Began { at, late, waited, ..*began };
            self.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{Epoch, Pool};

    use super::*;

    #[test]
    fn a_pass_waits_for_its_time_unless_a_wait_ended_the_last_section() {
        let at = Instant::now();
        let next = |late, after_ms, sectioned, pages| {
            let now = at + Duration::from_millis(after_ms);
            let waited = Duration::ZERO;
            Began { at, late, waited, held_until: None }.next(now, sectioned, pages)
        };
        let soon = Some(at + PASS_LEAST);
        for (late, after_ms, sectioned, pages, expected) in [
            (false, 1, false, 1000, soon),
            (false, 1, true, 1000, soon),
            (false, 40, false, 1000, None),
            (true, 1, false, 1000, soon),
            (true, 1, true, 64, None),
            // Nothing was dirty any more.
            (true, 1, true, 63, soon),
        ] {
            let found = next(late, after_ms, sectioned, pages);
            assert_eq!(found, expected, "{late} {after_ms} {sectioned} {pages}");
        }
    }

    fn batch(epoch: u32) -> Batch {
        let mut batch = Pool::new(1).take().unwrap();
        batch.epoch = Epoch(epoch);
        batch
    }

    #[test]
    fn a_held_epoch_begins_when_released_or_when_pacing_ends() {
        let ends: [fn(&Passes); 2] = [Passes::wake, |passes| passes.hold(None)];
        for end in ends {
            let (passes, let_go) = (Passes::default(), AtomicBool::new(false));
            passes.hold(Some(Duration::from_secs(3600)));
            std::thread::scope(|scope| {
                let held = scope.spawn(|| {
                    passes.took(&batch(1), || !let_go.load(Relaxed));
                    let_go.load(Relaxed)
                });
                std::thread::yield_now();
                let_go.store(true, Relaxed);
                end(&passes);
                assert!(held.join().unwrap(), "it did not wait");
            });
            assert_eq!(passes.epoch.load(Relaxed), 1);
        }
    }

    #[test]
    fn passes_are_paced_while_each_has_to_wait_for_long() {
        let (passes, first) = (Passes::default(), batch(1));
        passes.hold(Some(WAIT_LONG * 10));
        passes.took(&first, || true);
        assert!(passes.are_paced());
        passes.took(&batch(2), || false);
        assert!(!passes.are_paced(), "it did not wait");
    }
}
