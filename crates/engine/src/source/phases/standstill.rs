//! The VM stands still for its switchover: what that changes in any phase, and for how long.

use std::time::{Duration, Instant};

use api::Phase;
use transport::Delivered;
use wire::ToDestination;

use super::connect::Connected;
use crate::error::MigrationError;
use crate::source::blackout::{self, Blackout, Missing};
use crate::source::bounds::reschedule;

impl Connected<'_> {
    /// Notes that the VM has stopped for its switchover, and what was delivered by
    /// then.
    pub(crate) fn stopped(&mut self, at: Instant, delivered: Delivered) {
        self.context.blackout.stopped(at, delivered);
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
        blackout::allowed(self.context.request.blackout_max_s, goal, blackout::LEAST)
    }

    /// The time at which the move is taken back; none for a VM that was paused, and where it would
    /// not go on here.
    pub(crate) fn blackout_ends(&self, max: Duration) -> Option<Instant> {
        self.context.blackout.ends(max).filter(|_| self.context.may_end())
    }

    pub(crate) fn blackout_error(&self, allowed: Duration, missing: Missing) -> MigrationError {
        let host = self.context.peer.name.clone();
        let left = self.context.blackout.left(&host, missing);
        MigrationError::Blackout { host, allowed, least: blackout::LEAST, left }
    }
}
