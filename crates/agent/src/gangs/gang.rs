//! The state of one gang, for its watchers and for its saved report.

use std::time::{Duration, Instant};

use api::{
    GangOutcome, GangPlan, GangProgress, GangReport, GangRequest, GangTotals, MoveProgress,
    MoveReport, MoveState, Progress,
};
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use super::event::Event;

/// A gang, shared by its leading thread and its watchers.
pub(super) struct Gang {
    state: Mutex<State>,
    changed: Condvar,
    tell: Sender<Event>,
}

struct State {
    report: GangReport,
    /// The progress of each VM's migration, while it runs.
    flying: Vec<Option<Progress>>,
    began: Instant,
    version: u64,
}

impl Gang {
    pub(super) fn new(report: GangReport, tell: Sender<Event>) -> Self {
        let flying = vec![None; report.moves.len()];
        let state = State { report, flying, began: Instant::now(), version: 1 };
        Self { state: Mutex::new(state), changed: Condvar::new(), tell }
    }

    /// Sends a message to the leading thread.
    pub(super) fn send(&self, event: Event) {
        // An error means that the thread has ended.
        let _ = self.tell.send(event);
    }

    pub(super) fn report(&self) -> GangReport {
        self.state.lock().report.clone()
    }

    pub(super) fn is_over(&self) -> bool {
        self.state.lock().report.outcome.is_some()
    }

    pub(super) fn progress(&self) -> GangProgress {
        self.state.lock().progress()
    }

    /// Blocks until there is a state newer than `version`, at most `timeout`.
    pub(super) fn wait(&self, version: u64, timeout: Duration) -> (u64, GangProgress) {
        let mut state = self.state.lock();
        if state.version <= version {
            self.changed.wait_while_for(&mut state, |state| state.version <= version, timeout);
        }
        (state.version, state.progress())
    }

    pub(super) fn show(&self, number: usize, progress: Progress) {
        self.change(|state| {
            if let Some(flying) = state.flying.get_mut(number) {
                *flying = Some(progress);
            }
        });
    }

    /// Changes the report, and returns it to be saved.
    pub(super) fn update(&self, change: impl FnOnce(&mut GangReport)) -> GangReport {
        self.change(|state| {
            change(&mut state.report);
            state.report.total_s = state.began.elapsed().as_secs_f64();
            state.report.clone()
        })
    }

    /// As `update`, for a VM whose move has ended.
    pub(super) fn end(&self, number: usize, change: impl FnOnce(&mut MoveReport)) -> GangReport {
        self.change(|state| {
            if let Some(flying) = state.flying.get_mut(number) {
                *flying = None;
            }
            if let Some(one) = state.report.moves.get_mut(number) {
                change(one);
            }
            state.report.total_s = state.began.elapsed().as_secs_f64();
            state.report.clone()
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        state.version += 1;
        drop(state);
        self.changed.notify_all();
        result
    }
}

impl State {
    fn progress(&self) -> GangProgress {
        let flying = self.flying.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        let mut progress = progress_of(&self.report, flying);
        if progress.outcome.is_none() {
            progress.elapsed_s = self.began.elapsed().as_secs_f64();
        }
        progress
    }
}

/// The progress of a gang by its report and the progress of its migrations.
pub(super) fn progress_of<'p>(
    report: &GangReport,
    flying: impl Iterator<Item = Option<&'p Progress>>,
) -> GangProgress {
    let mut totals = GangTotals::default();
    let mut moves = Vec::with_capacity(report.moves.len());
    for (one, progress) in report.moves.iter().zip(flying) {
        let shown = MoveProgress {
            vm: one.vm.clone(),
            from: one.from.clone(),
            to: one.to.clone(),
            ram_bytes: one.ram_bytes,
            state: one.state,
            migration: one.migration.clone(),
            reason: one.reason.clone(),
            in_doubt: one.in_doubt,
            progress: progress.cloned(),
        };
        *match one.state {
            MoveState::Waiting => &mut totals.waiting,
            MoveState::Moving => &mut totals.moving,
            MoveState::Done => &mut totals.done,
            MoveState::Failed => &mut totals.failed,
            MoveState::Cancelled => &mut totals.cancelled,
        } += 1;
        totals.used_bytes = totals.used_bytes.saturating_add(one.used_bytes);
        totals.moved_bytes = totals.moved_bytes.saturating_add(part(one.used_bytes, shown.share()));
        totals.wire_bytes_per_s += progress.map_or(0.0, |progress| progress.wire_bytes_per_s);
        moves.push(shown);
    }
    GangProgress {
        id: report.id.clone(),
        elapsed_s: report.total_s,
        moves,
        totals,
        notes: report.notes.clone(),
        outcome: report.outcome,
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a share from 0 to 1, for people"
)]
fn part(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * share) as u64
}

/// The report of a gang that is about to begin.
pub(super) fn started(id: &str, request: &GangRequest, plan: &GangPlan, unix_s: u64) -> GangReport {
    let moves = plan.moves.iter().map(|planned| MoveReport {
        vm: planned.vm.clone(),
        from: planned.from.clone(),
        to: planned.to.clone(),
        ram_bytes: planned.ram_bytes,
        used_bytes: planned.used_bytes,
        state: MoveState::Waiting,
        migration: None,
        reason: None,
        in_doubt: false,
        limit_bits_per_s: None,
        figures: None,
    });
    GangReport {
        id: id.to_owned(),
        started_unix_s: unix_s,
        total_s: 0.0,
        parallel: request.parallel,
        atomic: request.atomic,
        evacuates: request.evacuate.as_ref().map(|evacuation| evacuation.host.clone()),
        options: request.options.clone(),
        outcome: None,
        moves: moves.collect(),
        notes: plan.notes.clone(),
    }
}

/// Fails the VMs that wait to leave the same host as this one, whose agent did not answer for long:
/// each of them would wait as long for it.
pub(super) fn fail_waiting(report: &mut GangReport, number: usize, why: &str) {
    let Some(from) = report.moves.get(number).map(|one| one.from.clone()) else { return };
    let waits = |one: &&mut MoveReport| one.state == MoveState::Waiting && one.from == from;
    for one in report.moves.iter_mut().filter(waits) {
        one.state = MoveState::Failed;
        one.reason = Some(why.to_owned());
    }
}

/// How a gang ended, by its VMs.
pub(super) fn outcome(report: &GangReport, was_cancelled: bool) -> GangOutcome {
    let any = |state| report.moves.iter().any(|one| one.state == state);
    match () {
        () if any(MoveState::Failed) => GangOutcome::Failed,
        () if was_cancelled && any(MoveState::Cancelled) => GangOutcome::Cancelled,
        // A migration was cancelled, but not by cancelling the gang.
        () if any(MoveState::Cancelled) => GangOutcome::Failed,
        () => GangOutcome::Done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_that_wait_for_a_silent_host_fail_with_the_one_that_tried() {
        use MoveState::{Done, Failed, Moving, Waiting};
        let request: GangRequest =
            serde_json::from_str(r#"{"evacuate":{"host":"x"},"parallel":2}"#).unwrap();
        let plan = GangPlan { moves: Vec::new(), rooms: Vec::new(), notes: Vec::new() };
        let mut report = started("g1", &request, &plan, 0);
        let states = [(Failed, "x"), (Moving, "x"), (Done, "x"), (Waiting, "x"), (Waiting, "y")];
        report.moves = states
            .map(|(state, from)| MoveReport {
                vm: "v".to_owned(),
                from: from.to_owned(),
                to: "z".to_owned(),
                ram_bytes: 1,
                used_bytes: 1,
                state,
                migration: None,
                reason: None,
                in_doubt: false,
                limit_bits_per_s: None,
                figures: None,
            })
            .into();
        fail_waiting(&mut report, 0, "it is off");
        let now: Vec<MoveState> = report.moves.iter().map(|one| one.state).collect();
        assert_eq!(now, [Failed, Moving, Done, Failed, Waiting]);
        assert_eq!(report.moves[3].reason.as_deref(), Some("it is off"));
        assert_eq!(report.evacuates.as_deref(), Some("x"));
    }
}
