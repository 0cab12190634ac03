//! How soon after one of QEMU's passes the next one may begin while a guest is
//! chased.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use page::{Batch, PAGE_BYTES};
use parking_lot::{Condvar, Mutex};

/// Between two passes: the guest pays for each with a fault for each page that it
/// writes again.
const PASS_LEAST: Duration = Duration::from_millis(100);
/// An epoch of this length pays for itself. With the classic stream, and with
/// machine types to 8.0, an epoch is one RAM section, which QEMU ends after 50
/// ms though there is more: the next is not to wait.
const EPOCH_LONG: Duration = Duration::from_millis(40);
/// QEMU looks at the clock after so many pages: a RAM section with fewer ended
/// because nothing was dirty any more.
const SECTION_PAGES: u64 = 64;

/// The epochs that the tap's threads see.
pub(crate) struct Passes {
    /// Epochs are RAM sections.
    sectioned: bool,
    epoch: AtomicU32,
    /// In this epoch, so far.
    pages: AtomicU64,
    began: Mutex<Began>,
    wake: Condvar,
}

#[derive(Clone, Copy, Debug)]
struct Began {
    at: Instant,
    /// It was held back: QEMU's section may have ended for that alone.
    late: bool,
    /// The next one does not begin before that.
    held_until: Option<Instant>,
}

impl Began {
    /// When the next epoch may begin, if not now.
    fn next(self, now: Instant, sectioned: bool, pages: u64) -> Option<Instant> {
        let may_go_on = sectioned && self.late && pages >= SECTION_PAGES;
        (now - self.at < EPOCH_LONG && !may_go_on).then(|| self.at + PASS_LEAST)
    }
}

impl Passes {
    pub(crate) fn new(sectioned: bool) -> Self {
        Self {
            sectioned,
            epoch: AtomicU32::new(0),
            pages: AtomicU64::new(0),
            began: Mutex::new(Began { at: Instant::now(), late: false, held_until: None }),
            wake: Condvar::new(),
        }
    }

    /// Whether passes are paced has changed.
    pub(crate) fn wake(&self) {
        let _began = self.began.lock();
        self.wake.notify_all();
    }

    /// For so long no epoch begins from now on, if passes are paced: a pass now would
    /// bring what has to be sent once more. None lets them go on.
    pub(crate) fn hold(&self, time: Option<Duration>) {
        let mut began = self.began.lock();
        began.held_until = time.map(|time| Instant::now() + time);
        if time.is_none() {
            self.wake.notify_all();
        }
    }

    /// How long ago the last epoch began.
    pub(crate) fn age(&self) -> Duration {
        self.began.lock().at.elapsed()
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
        let mut late = false;
        let soonest = began.next(Instant::now(), self.sectioned, self.pages.load(Relaxed));
        while is_new() && paced() {
            let until = soonest.max(began.held_until);
            let Some(until) = until.filter(|until| *until > Instant::now()) else { break };
            late = true;
            self.wake.wait_until(&mut began, until);
        }
        if is_new() {
            self.epoch.store(epoch, Relaxed);
            self.pages.store(pages, Relaxed);
            *began = Began { at: Instant::now(), late, ..*began };
            self.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use page::{Epoch, Pool};

    use super::*;

    #[test]
    fn a_pass_waits_for_its_time_and_what_a_wait_cut_off_does_not() {
        let at = Instant::now();
        let next = |late, after_ms, sectioned, pages| {
            let now = at + Duration::from_millis(after_ms);
            Began { at, late, held_until: None }.next(now, sectioned, pages)
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
    fn an_epoch_that_is_held_begins_when_it_is_let_or_nothing_is_paced_any_more() {
        let ends: [fn(&Passes); 2] = [Passes::wake, |passes| passes.hold(None)];
        for end in ends {
            let (passes, let_go) = (Passes::new(false), AtomicBool::new(false));
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
}
