//! The events of a migration.

use api::{Happening, Outcome, Report};
use engine::Watch;

use crate::events::shortened;

pub(super) fn began(watch: &Watch) -> Happening {
    let progress = watch.progress().1;
    Happening::MigrationBegan {
        migration: progress.id,
        vm: progress.vm,
        from: progress.from,
        to: progress.to,
    }
}

pub(super) fn ended(report: &Report) -> Happening {
    let reason = match &report.outcome {
        Outcome::Failed(why) => Some(shortened(why)),
        Outcome::Done | Outcome::Cancelled => None,
    };
    Happening::MigrationEnded {
        migration: report.id.clone(),
        vm: report.vm.clone(),
        from: report.from.clone(),
        to: report.to.clone(),
        result: (&report.outcome).into(),
        reason,
        downtime_ms: report.downtime_ms,
        total_s: report.total_s,
    }
}
