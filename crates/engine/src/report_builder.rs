//! Records the events of one migration, as progress while they happen, and for the report.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use api::{Bounds, BoundsChanged, Outcome, Phase, PhaseTime, Progress, Report, Sample};
use parking_lot::Mutex;
use switchover::journal::Listed;
use switchover::{MigrationId, Reason};
use wire::Cost;

use crate::watch::Watch;

/// The most samples kept. When there are more, every second one is dropped and they are taken half
/// as often.
const SAMPLES_MAX: usize = 1200;

/// The most notes kept. They may come from a peer, and the report is in memory.
const NOTES_MAX: usize = 64;

/// The most changes of bounds kept; the oldest are dropped.
const CHANGES_MAX: usize = 100;

pub(crate) struct ReportBuilder {
    started: Instant,
    watch: Arc<Watch>,
    state: Mutex<State>,
}

struct State {
    report: Report,
    /// A note that holds unless the downtime goal is met.
    forecast: Option<String>,
    /// Samples skipped for each one kept.
    thin: u32,
    passed: u32,
}

impl ReportBuilder {
    pub(crate) fn new(watch: Arc<Watch>, goal_ms: u64) -> Self {
        let (_, progress) = watch.progress();
        let started_unix_s =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let report = Report {
            downtime_goal_ms: goal_ms,
            bounds: watch.bounds(),
            phases: vec![PhaseTime { phase: Phase::Prepare, start_s: 0.0 }],
            // A placeholder until the outcome is known.
            ..Report::empty(&progress, started_unix_s, Outcome::Cancelled)
        };
        let state = Mutex::new(State { report, forecast: None, thin: 0, passed: 0 });
        Self { started: Instant::now(), watch, state }
    }

    pub(crate) fn elapsed_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// What operators know the migration by, for its journal.
    pub(crate) fn listed(&self) -> Option<Listed> {
        let state = self.state.lock();
        let id = MigrationId::new(&state.report.id).ok()?;
        Some(Listed { id, started_unix_s: state.report.started_unix_s })
    }

    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The migration enters `phase`. Phases only go forward.
    pub(crate) fn enter(&self, phase: Phase) {
        // The thread that reads QEMU's progress may see a later pass before the leading thread has
        // handled the notice of the first one.
        if phase == Phase::LaterPass {
            self.enter_one(Phase::FirstPass);
        }
        self.enter_one(phase);
    }

    fn enter_one(&self, phase: Phase) {
        let start_s = self.elapsed_s();
        let mut state = self.state.lock();
        let phases = &mut state.report.phases;
        if phases.last().is_some_and(|last| last.phase >= phase) {
            return;
        }
        phases.push(PhaseTime { phase, start_s });
        tracing::info!(?phase, at_s = start_s, "phase");
        drop(state);
        self.watch.update(|progress| {
            // Another thread may have reported a later one since.
            progress.phase = progress.phase.max(phase);
            progress.elapsed_s = progress.elapsed_s.max(start_s);
        });
    }

    /// Notes a feature that is not used, and why.
    pub(crate) fn note(&self, note: impl Into<String>) {
        let note = String::from(Reason::new(note));
        let mut state = self.state.lock();
        let notes = &state.report.notes;
        if notes.len() >= NOTES_MAX || notes.contains(&note) {
            return;
        }
        state.report.notes.push(note.clone());
        drop(state);
        self.watch.update(|progress| progress.notes.push(note));
    }

    /// Notes why the downtime goal may be missed: the note is removed if it is met.
    pub(crate) fn expect_miss(&self, note: String) {
        self.note(note.as_str());
        self.state.lock().forecast = Some(note);
    }

    /// The operator has changed the migration's bounds.
    pub(crate) fn rebound(&self, bounds: &Bounds) {
        let at_s = self.elapsed_s();
        self.update(|report| {
            report.bounds = bounds.clone();
            let changes = &mut report.bounds_changes;
            if changes.len() == CHANGES_MAX {
                changes.remove(0);
            }
            changes.push(BoundsChanged { at_s, bounds: bounds.clone() });
        });
    }

    pub(crate) fn sample(&self, sample: Sample, change: impl FnOnce(&mut Progress)) {
        let elapsed_s = sample.at_s;
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.passed < state.thin {
            state.passed += 1;
        } else {
            state.passed = 0;
            state.report.samples.push(sample);
        }
        if state.report.samples.len() > SAMPLES_MAX {
            let mut odd = false;
            state.report.samples.retain(|_| {
                odd = !odd;
                odd
            });
            state.thin = state.thin * 2 + 1;
        }
        self.watch.update(|progress| {
            progress.elapsed_s = elapsed_s;
            change(progress);
        });
    }

    /// Changes the report.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.state.lock().report);
    }

    /// The destination has reported its cost.
    pub(crate) fn took_there(&self, cost: &Cost) {
        self.update(|report| {
            report.cpu_destination_s = cost.cpu_s;
            report.pool_high_water_bytes[1] = cost.pool_high_water_bytes;
            report.peer_bytes = cost.peer_bytes;
            report.again_bytes = cost.again_bytes;
            report.stored_bytes = cost.stored_bytes;
            report.storage_read_bytes = cost.storage_read_bytes;
            // The VM ran this long before the destination reported it.
            let ran_ms = cost.ran_ms.max(0.0);
            report.downtime_ms = report.downtime_ms.map(|ms| (ms - ran_ms).max(0.0));
        });
    }

    /// Ends the migration: shows the outcome as progress, and returns the report.
    pub(crate) fn end(&self, outcome: Outcome) -> Report {
        let (mut report, forecast) = {
            let state = self.state.lock();
            (state.report.clone(), state.forecast.clone())
        };
        report.outcome = outcome.clone();
        if report.downtime_ms.is_some_and(|ms| ms <= report.downtime_goal_ms as f64) {
            report.notes.retain(|note| Some(note) != forecast.as_ref());
        }
        report.total_s = self.elapsed_s();
        let done = outcome == Outcome::Done;
        self.watch.update(|progress| {
            progress.elapsed_s = report.total_s;
            if done {
                progress.percent = 100.0;
                progress.left_bytes = 0;
            }
            progress.notes.clone_from(&report.notes);
            progress.outcome = Some(outcome);
            progress.in_doubt = report.in_doubt;
        });
        report
    }
}

#[cfg(test)]
mod tests {
    use api::{DiskReport, LaneReport};

    use super::*;
    use crate::resources::LANES_MAX;

    #[test]
    fn a_downtime_that_met_its_goal_was_not_expected_to_miss_it() {
        let notes = |downtime_ms| {
            let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
            let watch = Arc::new(Watch::new(progress, Bounds::default()));
            let builder = ReportBuilder::new(Arc::clone(&watch), 300);
            builder.expect_miss("downtime is likely to miss its goal".to_owned());
            builder.note("another note");
            builder.update(|report| report.downtime_ms = downtime_ms);
            let notes = builder.end(Outcome::Done).notes;
            assert_eq!(watch.progress().1.notes, notes);
            notes.len()
        };
        assert_eq!([Some(36.0), Some(301.0), None].map(notes), [1, 2, 2]);
    }

    /// With all that a peer and an operator may cause.
    #[test]
    fn a_report_has_a_size_that_it_does_not_exceed() {
        const DISKS_MAX: usize = 256;
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        let builder = ReportBuilder::new(watch, 300);
        let rate = 123_456_789.123_456_79;
        for nth in 0..3 * SAMPLES_MAX {
            let sample = Sample {
                at_s: nth as f64 / 17.0,
                delivered_bytes_per_s: rate,
                wire_bytes_per_s: rate,
                dirty_bytes_per_s: rate,
                share: 1.0 / 3.0,
                left_bytes: u64::MAX,
                pool_bytes: u64::MAX,
                lanes_bytes_per_s: vec![rate; LANES_MAX],
            };
            builder.sample(sample, |_| {});
        }
        let every_second: Vec<String> = (0..1024).step_by(2).map(|cpu| cpu.to_string()).collect();
        let bounds = Bounds { cpus: every_second.join(",").parse().ok(), ..Bounds::default() };
        assert!(bounds.cpus.is_some());
        (0..2 * CHANGES_MAX).for_each(|_| builder.rebound(&bounds));
        for nth in 0..2 * NOTES_MAX {
            // Two bytes of JSON for each.
            builder.note(format!("{nth}{}", "\"".repeat(4096)));
        }
        builder.update(|report| {
            report.lanes =
                vec![LaneReport { name: "f".repeat(100), ..LaneReport::default() }; LANES_MAX];
            let name = "d".repeat(1024);
            report.disks = vec![DiskReport { name, ..DiskReport::default() }; DISKS_MAX];
        });
        let report = builder.end(Outcome::Failed(String::from(Reason::new("w".repeat(1 << 20)))));
        assert!(report.samples.len() > SAMPLES_MAX / 2 && report.samples.len() <= SAMPLES_MAX);
        let counts = (report.notes.len(), report.bounds_changes.len());
        assert_eq!(counts, (NOTES_MAX, CHANGES_MAX));
        let bytes = serde_json::to_vec(&report).unwrap().len();
        assert!(bytes < 3 << 20, "{bytes}");
    }

    /// As on a busy host, where the sampler is first.
    #[test]
    fn a_later_pass_follows_a_first_one() {
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        let builder = ReportBuilder::new(watch, 300);
        for phase in [Phase::LaterPass, Phase::FirstPass, Phase::Stopped] {
            builder.enter(phase);
        }
        let mut phases = Vec::new();
        builder.update(|report| phases = report.phases.iter().map(|one| one.phase).collect());
        let expected = [Phase::Prepare, Phase::FirstPass, Phase::LaterPass, Phase::Stopped];
        assert_eq!(phases, expected);
    }
}
