//! The blackout bound: the longest downtime of a switchover. At the bound the move is
//! taken back, whatever the destination does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use transport::Delivered;

/// The default bound is this multiple of the downtime goal ...
const GOALS: u32 = 10;
/// ... and at least this long, which a busy host may need for the shortest goal.
pub(crate) const LEAST: Duration = Duration::from_secs(3);
/// The same for a domain of Xen: xl starts its disks and network cards meanwhile, by scripts.
pub(crate) const LEAST_OF_DOMAIN: Duration = Duration::from_secs(60);

/// The VM's switchover, from its stop on.
#[derive(Debug, Default)]
pub(crate) struct Blackout {
    /// QEMU's stop of the VM.
    stop: Option<Stop>,
    /// When a VM that was running stopped.
    since: Option<Instant>,
    /// Whether QEMU has stopped the VM for its switchover, as last reported.
    stands_still: Arc<AtomicBool>,
    reached: Reached,
}

/// How far the switchover is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    /// Memory and disks arrive.
    #[default]
    Delivery,
    /// The VM's disks are written and flushed at the destination.
    DisksFlushed,
    /// The VM was handed over completely: the destination is loading it.
    Loading,
}

/// The time of QEMU's stop, and what was delivered by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    pub(crate) at: Instant,
    pub(crate) delivered: Delivered,
}

/// What has not yet arrived of a stopped VM.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missing {
    pub(crate) memory_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) disks_move: bool,
}

impl Blackout {
    /// Notes that the VM is stopped, which counts only if it was running.
    pub(crate) fn begins(&mut self, at: Instant, ran: bool) {
        self.stands_still.store(true, Relaxed);
        if ran {
            self.since.get_or_insert(at);
        }
    }

    /// Notes QEMU's stop of the VM, and what was delivered by then.
    pub(crate) fn stopped(&mut self, at: Instant, delivered: Delivered) {
        self.stop = Some(Stop { at, delivered });
    }

    pub(crate) fn stop(&self) -> Option<Stop> {
        self.stop
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.since.is_some()
    }

    /// When the downtime will have been `max`; none if that is not to be foreseen.
    pub(crate) fn ends(&self, max: Duration) -> Option<Instant> {
        self.since?.checked_add(max)
    }

    /// Notes that the VM runs again.
    pub(crate) fn is_over(&mut self) {
        self.stands_still.store(false, Relaxed);
        self.since = None;
    }

    /// Whether the VM is stopped for its switchover, for other threads.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stands_still)
    }

    /// Notes that the VM would be stopped anyway: its stop was not QEMU's switchover.
    pub(crate) fn forget(&mut self) {
        self.is_over();
        self.stop = None;
    }

    pub(crate) fn drained(&mut self) {
        self.reached = self.reached.max(Reached::DisksFlushed);
    }

    pub(crate) fn loads(&mut self) {
        self.reached = Reached::Loading;
    }

    /// The remaining work, for an error.
    pub(crate) fn left(&self, host: &str, missing: Missing) -> String {
        let Missing { memory_bytes, disk_bytes, disks_move } = missing;
        match (self.reached, memory_bytes, disk_bytes) {
            (Reached::Loading, ..) => format!("{host} had not loaded it"),
            (Reached::Delivery, 0, 0) if disks_move => {
                format!("its disks were not flushed at {host}")
            }
            (_, 0, 0) => "QEMU here had not handed over all of it".to_owned(),
            (_, 0, bytes) => format!("{} KiB of its disks were not written at {host}", bytes >> 10),
            (_, bytes, _) => format!("{} KiB of its memory had not arrived at {host}", bytes >> 10),
        }
    }
}

/// The longest permitted downtime: as requested, or by the goal, and then `least` at least.
pub(crate) fn allowed(requested_s: Option<u64>, goal: Duration, least: Duration) -> Duration {
    match requested_s {
        Some(seconds) => Duration::from_secs(seconds),
        None => goal.saturating_mul(GOALS).max(least),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::MigrationError;

    #[test]
    fn the_bound_is_the_operators_or_ten_goals_and_a_least() {
        let ms = Duration::from_millis;
        for (requested_s, goal, expected) in [
            (None, ms(1), ms(3000)),
            (None, ms(300), ms(3000)),
            (None, ms(800), ms(8000)),
            (Some(1), ms(800), ms(1000)),
            (Some(60), ms(1), ms(60_000)),
            (None, Duration::MAX, Duration::MAX),
        ] {
            assert_eq!(allowed(requested_s, goal, LEAST), expected, "{requested_s:?} {goal:?}");
        }
        for (requested_s, goal, expected) in [
            (None, ms(300), ms(60_000)),
            (None, ms(8000), ms(80_000)),
            (Some(1), ms(300), ms(1000)),
        ] {
            let bound = allowed(requested_s, goal, LEAST_OF_DOMAIN);
            assert_eq!(bound, expected, "{requested_s:?} {goal:?}");
        }
    }

    #[test]
    fn the_error_has_the_bound_of_its_kind_of_vm() {
        for (least, by_default) in [(LEAST, "3 s at least"), (LEAST_OF_DOMAIN, "60 s at least")] {
            let (host, left) = ("b".to_owned(), "b had not loaded it".to_owned());
            let allowed = allowed(None, Duration::from_secs(1), least);
            let error = MigrationError::Blackout { host, allowed, least, left }.to_string();
            let bound = format!("for {:.1} s, the most that", allowed.as_secs_f64());
            assert!(error.contains(&bound) && error.ends_with(by_default), "{error}");
        }
    }

    #[test]
    fn the_error_names_what_is_missing() {
        use super::Reached::{Delivery, DisksFlushed, Loading};
        for (memory_bytes, disk_bytes, reached, expected) in [
            (5 << 20, 1 << 20, Delivery, "5120 KiB of its memory had not arrived at b"),
            (0, 1 << 20, Delivery, "1024 KiB of its disks were not written at b"),
            (0, 0, Delivery, "its disks were not flushed at b"),
            (0, 0, DisksFlushed, "QEMU here had not handed over all of it"),
            (0, 0, Loading, "b had not loaded it"),
        ] {
            let missing = Missing { memory_bytes, disk_bytes, disks_move: true };
            let blackout = Blackout { reached, ..Blackout::default() };
            assert_eq!(blackout.left("b", missing), expected);
        }
    }

    #[test]
    fn the_bound_counts_from_the_first_stop_of_a_running_vm() {
        let (mut blackout, first) = (Blackout::default(), Instant::now());
        blackout.begins(first, false);
        assert_eq!(blackout.since, None);
        blackout.begins(first, true);
        blackout.begins(first + LEAST, true);
        assert_eq!(blackout.since, Some(first));
        assert_eq!(blackout.ends(LEAST), Some(first + LEAST));
        assert_eq!(blackout.ends(Duration::from_secs(u64::MAX)), None);
        blackout.is_over();
        assert_eq!((blackout.since, blackout.ends(LEAST)), (None, None));
    }

    #[test]
    fn a_vm_that_would_be_stopped_anyway_has_no_bound() {
        let at = Instant::now();
        let mut blackout = Blackout::default();
        blackout.stopped(at, Delivered::default());
        blackout.begins(at, true);
        blackout.forget();
        assert!(blackout.stop().is_none() && !blackout.has_begun());
        assert!(!blackout.flag().load(Relaxed), "its guest may be throttled again");
    }
}
