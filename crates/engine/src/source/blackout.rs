//! The blackout bound: how long the VM may stand still for its switchover. Whatever the
//! destination does or does not do, the move is taken back then.

use std::time::{Duration, Instant};

use api::{Phase, Priority};
use transport::Delivered;
use wire::ToDestination;

use super::context::sched_params;
use super::phases::connect::Connected;
use crate::error::MigrationError;

/// Without the operator's word: so many times the goal for the downtime...
const GOALS: u32 = 10;
/// ... and this at least, which a busy host may need for the shortest goal.
const LEAST: Duration = Duration::from_secs(3);

/// The VM's switchover, from its stop on.
#[derive(Debug, Default)]
pub(crate) struct Blackout {
    /// QEMU has stopped it.
    stop: Option<Stop>,
    /// Since when a VM that ran stands still.
    since: Option<Instant>,
    /// Its disks are written and flushed at the destination.
    drained: bool,
    /// All of the VM was handed over: the destination is to load it.
    loading: bool,
}

/// When QEMU stopped the VM, and what was delivered by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    pub(crate) at: Instant,
    pub(crate) delivered: Delivered,
}

/// What has not arrived of a VM that stands still.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missing {
    pub(crate) memory_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) disks_move: bool,
}

/// What is left of a VM that stands still, in words.
struct Left<'h> {
    host: &'h str,
    missing: Missing,
    drained: bool,
    loading: bool,
}

impl Blackout {
    /// It stands still, which only counts if it would run.
    pub(crate) fn begins(&mut self, at: Instant, ran: bool) {
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

    /// It runs again.
    pub(crate) fn is_over(&mut self) {
        self.since = None;
    }

    /// It would stand still anyway: what stopped it was not QEMU's switchover.
    pub(crate) fn forget(&mut self) {
        (self.stop, self.since) = (None, None);
    }

    pub(crate) fn drained(&mut self) {
        self.drained = true;
    }

    pub(crate) fn loads(&mut self) {
        self.loading = true;
    }
}

impl Connected<'_> {
    /// The VM has stopped for its switchover, with so much delivered by then.
    pub(crate) fn stopped(&mut self, at: Instant, delivered: Delivered) {
        self.context.blackout.stop = Some(Stop { at, delivered });
        self.context.report_builder.enter(Phase::Stopped);
        self.stands_still(at);
    }

    /// Until now the VM's data gave way to other work. From now on the VM waits for it:
    /// no thread that carries it is nicer than the agent, at either end.
    pub(crate) fn stands_still(&mut self, at: Instant) {
        let context = &mut self.context;
        let had_begun = context.blackout.has_begun();
        context.blackout.begins(at, context.was_running);
        let bounds = context.report_builder.watch().bounds();
        if had_begun || bounds.priority != Priority::Low {
            return;
        }
        let params = sched_params(&bounds, true);
        context.threads.set(&params);
        // A destination that doesn't hear it is only slower.
        let _ = self.control.send(&ToDestination::Terms(params));
    }

    /// How long the VM may stand still, with this goal for its downtime.
    pub(crate) fn blackout_max(&self, goal: Duration) -> Duration {
        allowed(self.context.request.blackout_max_s, goal)
    }

    /// When the move is taken back, if that is to be.
    pub(crate) fn blackout_ends(&self, max: Duration) -> Option<Instant> {
        let since = self.context.blackout.since.filter(|_| !self.context.committed)?;
        Some(since + max)
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
        None => (goal * GOALS).max(LEAST),
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
        ] {
            assert_eq!(allowed(asked_s, goal), expected, "{asked_s:?} {goal:?}");
        }
    }

    #[test]
    fn it_says_what_was_waited_for() {
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
    fn it_counts_from_the_first_stop_of_a_vm_that_ran() {
        let (mut blackout, first) = (Blackout::default(), Instant::now());
        blackout.begins(first, false);
        assert_eq!(blackout.since, None);
        blackout.begins(first, true);
        blackout.begins(first + LEAST, true);
        assert_eq!(blackout.since, Some(first));
        blackout.is_over();
        assert_eq!(blackout.since, None);
    }

    #[test]
    fn a_vm_that_would_stand_still_anyway_has_none() {
        let at = Instant::now();
        let stop = Some(Stop { at, delivered: Delivered::default() });
        let mut blackout = Blackout { stop, ..Blackout::default() };
        blackout.begins(at, true);
        blackout.forget();
        assert!(blackout.stop().is_none() && !blackout.has_begun());
    }
}
