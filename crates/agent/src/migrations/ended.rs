//! Migrations of which only a report is left, or not even that.

use api::{Limit, Outcome, Phase, Progress, Report};
use engine::{Migrated, Watch};

use super::reports::empty;

/// The report of a migration that the engine gave none for.
pub(super) fn fault(watch: &Watch, why: &str) -> Migrated {
    let progress = watch.progress().1;
    let why = format!("{why}. `droveway show {}` says how the VM is", progress.vm);
    let report = empty(&progress, Outcome::Failed(why));
    Migrated { report, unsettled: None, decided: true }
}

/// The last state of a migration of which only the report is left.
pub(super) fn ended_progress(report: &Report) -> Progress {
    let done = report.outcome == Outcome::Done;
    Progress {
        id: report.id.clone(),
        vm: report.vm.clone(),
        from: report.from.clone(),
        to: report.to.clone(),
        phase: report.phases.last().map_or(Phase::Prepare, |last| last.phase),
        elapsed_s: report.total_s,
        ram_bytes: report.ram_bytes,
        percent: if done { 100.0 } else { 0.0 },
        delivered_bytes_per_s: 0.0,
        wire_bytes_per_s: 0.0,
        dirty_bytes_per_s: 0.0,
        share: 1.0,
        pass: report.passes,
        left_bytes: 0,
        disk_bytes: 0,
        disk_left_bytes: 0,
        time_left_s: None,
        limit: Limit::Unknown,
        notes: report.notes.clone(),
        outcome: Some(report.outcome.clone()),
    }
}
