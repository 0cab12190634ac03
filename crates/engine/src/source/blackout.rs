//! The blackout bound: the longest downtime of a switchover. At the bound the move is
//! taken back, whatever the destination does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use api::Phase;
use transport::Delivered;
use wire::ToDestination;

use super::bounds::reschedule;
use super::phases::connect::Connected;
use crate::error::MigrationError;

/// The default bound is this multiple of the downtime goal ...
const GOALS: u32 = 10;
/// ... and at least this long, which a busy host may need for the shortest goal.
const LEAST: Duration = Duration::from_secs(3);

/// The VM's switchover, from its stop on.
#[derive(Debug, Default)]
pub(crate) struct Blackout {
    /// QEMU's stop of the VM.
    stop: Option<Stop>,
    /// When a VM that was running stopped.
    since: Option<Instant>,
    /// Whether QEMU has stopped the VM for its switchover, as last reported.
    stands_still: Arc<AtomicBool>,
    /// The VM's disks are written and flushed at the destination.
    drained: bool,
    /// The VM was handed over completely: the destination is loading it.
    loading: bool,
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

/// The remaining work for a stopped VM, in words.
struct Left<'h> {
    host: &'h str,
    missing: Missing,
    drained: bool,
    loading: bool,
}

impl Blackout {
    /// Notes that the VM is stopped, which counts only if it was running.
    pub(crate) fn begins(&mut self, at: Instant, ran: bool) {
        self.stands_still.store(true, Relaxed);
        if ran {
            self.since.get_or_insert(at);
        }
    }

    pub(crate) fn stop(&self) -> Option<Stop> {
        self.stop
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.since.is_some()
    }

    /// When the downtime will have been `max`; none if that is not to be foreseen.
    fn ends(&self, max: Duration) -> Option<Instant> {
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
        self.drained = true;
    }

    pub(crate) fn loads(&mut self) {
        self.loading = true;
    }
}

impl Connected<'_> {
    /// Notes that the VM has stopped for its switchover, and what was delivered by
    /// then.
    pub(crate) fn stopped(&mut self, at: Instant, delivered: Delivered) {
        self.context.blackout.stop = Some(Stop { at, delivered });
        self.context.report_builder.enter(Phase::Stopped);
        self.stands_still(at);
    }

    /// Raises the priority of the data threads, for which the VM now waits.
    pub(crate) fn stands_still(&mut self, at: Instant) {
        let context = &mut self.context;
        let had_begun = context.blackout.has_begun();
        context.blackout.begins(at, context.was_running);
        if !had_begun
            && let Some(terms) = reschedule(&context.report_builder, &context.threads, true)
        {
            // A destination that misses this is only slower.
            let _ = self.control.send(&ToDestination::Terms(terms));
        }
    }

    /// Takes back [`Connected::stands_still`]: the VM runs again, or its stop was not for its
    /// switchover.
    pub(crate) fn goes_on(&mut self, undo: impl Fn(&mut Blackout)) {
        let context = &mut self.context;
        let had_begun = context.blackout.has_begun();
        undo(&mut context.blackout);
        if had_begun
            && let Some(terms) = reschedule(&context.report_builder, &context.threads, false)
        {
            let _ = self.control.send(&ToDestination::Terms(terms));
        }
    }

    /// The longest permitted downtime, given the goal.
    pub(crate) fn blackout_max(&self, goal: Duration) -> Duration {
        allowed(self.context.request.blackout_max_s, goal)
    }

    /// The time at which the move is taken back; none for a VM that was paused, and after the
    /// commit.
    pub(crate) fn blackout_ends(&self, max: Duration) -> Option<Instant> {
        self.context.blackout.ends(max).filter(|_| !self.context.committed)
    }

    pub(crate) fn blackout_error(&self, allowed: Duration, missing: Missing) -> MigrationError {
        let host = self.context.peer.name.clone();
        let Blackout { drained, loading, .. } = self.context.blackout;
        let left = Left { host: &host, missing, drained, loading }.to_string();
        MigrationError::Blackout { host, allowed, left }
    }
}

fn allowed(asked_s: Option<u64>, goal: Duration) -> Duration {
    match asked_s {
        Some(seconds) => Duration::from_secs(seconds),
        None => goal.saturating_mul(GOALS).max(LEAST),
    }
}

impl std::fmt::Display for Left<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, missing, drained, loading } = self;
        let Missing { memory_bytes, disk_bytes, disks_move } = missing;
        match (memory_bytes, disk_bytes) {
            _ if *loading => write!(f, "{host} had not loaded it"),
            (0, 0) if *disks_move && !drained => write!(f, "its disks were not flushed at {host}"),
            (0, 0) => write!(f, "QEMU here had not handed over all of it"),
            (0, bytes) => write!(f, "{} KiB of its disks were not written at {host}", bytes >> 10),
            (bytes, _) => write!(f, "{} KiB of its memory had not arrived at {host}", bytes >> 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_operators_or_ten_goals_and_three_seconds_at_least() {
        let ms = Duration::from_millis;
        for (asked_s, goal, expected) in [
            (None, ms(1), ms(3000)),
            (None, ms(300), ms(3000)),
            (None, ms(800), ms(8000)),
            (Some(1), ms(800), ms(1000)),
            (Some(60), ms(1), ms(60_000)),
            (None, Duration::MAX, Duration::MAX),
        ] {
            assert_eq!(allowed(asked_s, goal), expected, "{asked_s:?} {goal:?}");
        }
    }

    #[test]
    fn the_error_names_what_is_missing() {
        let says = |memory_bytes, disk_bytes, draining: bool, loading| {
            let missing = Missing { memory_bytes, disk_bytes, disks_move: true };
            Left { host: "b", missing, drained: !draining, loading }.to_string()
        };
        for (said, expected) in [
            (says(5 << 20, 1 << 20, true, false), "5120 KiB of its memory had not arrived at b"),
            (says(0, 1 << 20, true, false), "1024 KiB of its disks were not written at b"),
            (says(0, 0, true, false), "its disks were not flushed at b"),
            (says(0, 0, false, false), "QEMU here had not handed over all of it"),
            (says(0, 0, true, true), "b had not loaded it"),
        ] {
            assert_eq!(said, expected);
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
        let stop = Some(Stop { at, delivered: Delivered::default() });
        let mut blackout = Blackout { stop, ..Blackout::default() };
        blackout.begins(at, true);
        blackout.forget();
        assert!(blackout.stop().is_none() && !blackout.has_begun());
        assert!(!blackout.flag().load(Relaxed), "its guest may be throttled again");
    }
}
