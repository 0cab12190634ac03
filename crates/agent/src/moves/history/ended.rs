//! Migrations of which only the report is left, or that have none from the engine.

use api::{Outcome, Phase, Progress, Report};
use engine::{Migrated, Settlement, Watch};

use super::reports::empty;

/// The result of a migration for which the engine gave no report.
pub(in crate::moves) fn fault(watch: &Watch, why: &str) -> Migrated {
    let progress = watch.progress().1;
    let why = format!("{why}. `droveway show {}` shows the VM's state", progress.vm);
    let report = empty(&progress, Outcome::Failed(why));
    Migrated { report, settlement: Settlement::Settled }
}

/// The last state of a migration of which only the report is left.
pub(in crate::moves) fn ended_progress(report: &Report) -> Progress {
    let done = report.outcome == Outcome::Done;
    Progress {
        phase: report.phases.last().map_or(Phase::Prepare, |last| last.phase),
        elapsed_s: report.total_s,
        percent: if done { 100.0 } else { 0.0 },
        pass: report.passes,
        left_bytes: 0,
        notes: report.notes.clone(),
        outcome: Some(report.outcome.clone()),
        in_doubt: report.in_doubt,
        ..Progress::new((&report.id, &report.vm), (&report.from, &report.to), report.ram_bytes)
    }
}
