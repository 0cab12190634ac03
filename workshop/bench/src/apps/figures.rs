//! What a program in a guest did while the guest moved.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::contender::Moved;
use crate::served::Served;

/// Work that the migration leaves until after the VM runs is its effect, too.
pub(super) const AFTER: Duration = Duration::from_secs(3);

/// What a program in a guest did: transactions, operations, bytes or answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AppFigures {
    /// Per second before the migration.
    pub before_per_s: f64,
    /// Per second during it.
    pub meanwhile_per_s: f64,
    /// What is missing from its start until some seconds after it, as seconds of work before.
    pub lost_s: f64,
}

impl AppFigures {
    /// From `done`, which returns the work between two instants; the program was undisturbed from
    /// `alone` to `moving`.
    pub(super) fn of(
        done: impl Fn(Instant, Instant) -> f64,
        (alone, moving): (Instant, Instant),
        moved: &Moved,
    ) -> Self {
        let seconds =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64().max(1e-3);
        let per_s = |from, to| done(from, to) / seconds(from, to);
        let (before_per_s, end) = (per_s(alone, moving), moved.ran + AFTER);
        let done_s = done(moved.began, end) / before_per_s.max(1e-3);
        Self {
            before_per_s,
            meanwhile_per_s: per_s(moved.began, moved.ran),
            lost_s: seconds(moved.began, end) - done_s,
        }
    }
}

impl From<&Served> for AppFigures {
    fn from(served: &Served) -> Self {
        Self {
            before_per_s: served.before_per_s,
            meanwhile_per_s: served.during_per_s,
            lost_s: served.lost / served.before_per_s.max(1e-3),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::count;

    #[test]
    fn what_is_missing_is_counted_until_some_seconds_after_the_move() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        // 100 a second for ten seconds, 50 while it moves, then 100 again.
        let counts = [(at(0), 0), (at(10), 1000), (at(14), 1200), (at(30), 2800)];
        let (began, ran) = (at(10), at(14));
        let (prepare, downtime) = (Duration::ZERO, Duration::ZERO);
        let moved = Moved { began, ran, prepare, downtime, passes: None };
        let done = |from, to| count::between(&counts, from, to);
        let figures = AppFigures::of(done, (at(2), at(9)), &moved);
        let expected = AppFigures { before_per_s: 100.0, meanwhile_per_s: 50.0, lost_s: 2.0 };
        for (found, expected) in [
            (figures.before_per_s, expected.before_per_s),
            (figures.meanwhile_per_s, expected.meanwhile_per_s),
            (figures.lost_s, expected.lost_s),
        ] {
            assert!((found - expected).abs() < 1e-6, "{figures:?}");
        }
    }
}
