//! The operator's bounds, as this end applies them.

use api::{Bounds, Priority};
use data_threads::{DataThreads, SchedParams};

use super::control::pacing::{Pacing, pace_bounds};
use crate::report_builder::ReportBuilder;

/// How data threads are scheduled: once the VM is stopped, they are no nicer than the
/// agent.
pub(crate) fn sched_params(bounds: &Bounds, stands_still: bool) -> SchedParams {
    let least = if stands_still { Priority::Normal } else { Priority::Low };
    SchedParams { priority: bounds.priority.max(least), cpus: bounds.cpus.clone() }
}

/// Applies the operator's new bounds at this end. Returns the terms for the other end.
pub(crate) fn rebind(
    report_builder: &ReportBuilder,
    threads: &DataThreads,
    pacing: Option<&Pacing>,
    stands_still: bool,
) -> SchedParams {
    let bounds = report_builder.watch().bounds();
    tracing::info!(?bounds, "other bounds");
    report_builder.rebound(&bounds);
    let params = sched_params(&bounds, stands_still);
    threads.set(&params);
    if let Some(pacing) = pacing {
        pacing.set(pace_bounds(&bounds));
    }
    params
}
