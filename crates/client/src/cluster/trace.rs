//! The rates of running migrations since this program started to watch them.

use std::collections::{BTreeSet, HashMap};

use api::Progress;

/// The most points of one migration; beyond that, every other point is removed.
const POINTS_MAX: usize = 240;

/// A migration's rates at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Seconds since the command.
    pub at_s: f64,
    /// Bytes a second on the wire.
    pub wire: f64,
    /// Bytes of the guest's memory that were delivered, a second.
    pub delivered: f64,
    /// Bytes that the guest writes a second. None while it is not known.
    pub dirty: Option<f64>,
}

/// The points of one migration.
#[derive(Debug, Default)]
pub(super) struct Trace {
    points: Vec<Point>,
    /// The least time between two points, after some were removed.
    step_s: f64,
}

impl Trace {
    fn note(&mut self, progress: &Progress) {
        let at_s = progress.elapsed_s;
        if self
            .points
            .last()
            .is_some_and(|last| at_s <= last.at_s || at_s < last.at_s + self.step_s)
        {
            return;
        }
        if self.points.len() >= POINTS_MAX {
            let mut nth = 0;
            self.points.retain(|_| {
                nth += 1;
                nth % 2 == 1
            });
            self.step_s = at_s / POINTS_MAX as f64 * 2.0;
        }
        self.points.push(Point {
            at_s,
            wire: progress.wire_bytes_per_s,
            delivered: progress.delivered_bytes_per_s,
            dirty: progress.dirties(),
        });
    }
}

/// The traces by migration id.
#[derive(Debug, Default)]
pub(super) struct Traces(HashMap<String, Trace>);

impl Traces {
    pub(super) fn of(&self, id: &str) -> &[Point] {
        self.0.get(id).map_or(&[], |trace| &trace.points)
    }

    /// The ids of running migrations.
    pub(super) fn ids(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }

    /// Adds the present rates, and forgets migrations that no longer run.
    pub(super) fn note<'p>(&mut self, running: impl Iterator<Item = &'p Progress>) {
        let mut kept = HashMap::new();
        for progress in running {
            let mut trace = self.0.remove(&progress.id).unwrap_or_default();
            trace.note(progress);
            kept.insert(progress.id.clone(), trace);
        }
        self.0 = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::moving;
    use super::*;

    #[test]
    fn a_trace_stays_small_and_in_order_and_ends_with_its_migration() {
        let mut traces = Traces::default();
        for second in 0..10_000 {
            let progress = Progress { elapsed_s: f64::from(second), ..moving("web1") };
            traces.note([&progress].into_iter());
        }
        let id = moving("web1").id;
        let points = traces.of(&id);
        assert!(points.len() > POINTS_MAX / 4 && points.len() <= POINTS_MAX, "{}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].at_s < pair[1].at_s));
        assert!(points[0].at_s < 1.0 && points[points.len() - 1].at_s > 9_800.0);
        traces.note(std::iter::empty());
        assert!(traces.of(&id).is_empty());
    }
}
