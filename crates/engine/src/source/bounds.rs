//! The operator's bounds, as this end applies them.

use std::sync::Arc;

use api::{Bounds, Priority};
use crossbeam_channel::Sender;
use data_threads::{DataThreads, SchedParams};

use super::control::pacing::{Pacing, pace_bounds};
use super::notice::Notice;
use crate::report_builder::ReportBuilder;

/// How data threads are scheduled: once the VM is stopped, they are no nicer than the
/// agent.
pub(crate) fn sched_params(bounds: &Bounds, stands_still: bool) -> SchedParams {
    let least = if stands_still { Priority::Normal } else { Priority::Low };
    SchedParams {
        priority: bounds.priority.max(least),
        cpus: bounds.cpus.clone(),
        cpu_floor: bounds.cpu_floor,
    }
}

/// The data threads at this end. A panic of one is a notice.
pub(crate) fn bounded_threads(
    report_builder: &ReportBuilder,
    notices: &Sender<Notice>,
) -> Arc<DataThreads> {
    let params = sched_params(&report_builder.watch().bounds(), false);
    let notices = notices.clone();
    DataThreads::new(params, move |thread| {
        let _ = notices.send(Notice::Panicked(thread.to_owned()));
    })
}

/// Schedules the data threads for a VM that has stopped for its switchover, or runs again.
///
/// While the VM runs, its data gives way to other work; once it waits for its data, no thread
/// that carries it may be nicer than the agent, at either end. Returns the terms for the other
/// end; none if nothing changes.
pub(crate) fn reschedule(
    report_builder: &ReportBuilder,
    threads: &DataThreads,
    stands_still: bool,
) -> Option<SchedParams> {
    let bounds = report_builder.watch().bounds();
    if bounds.priority != Priority::Low {
        return None;
    }
    let params = sched_params(&bounds, stands_still);
    threads.set(&params);
    Some(params)
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

#[cfg(test)]
mod tests {
    use api::Progress;
    use crossbeam_channel::unbounded;

    use super::*;
    use crate::watch::Watch;

    #[test]
    fn only_what_gave_way_is_hurried_for_a_vm_that_stands_still() {
        let hurried = |priority| {
            let bounds = Bounds { priority, ..Bounds::default() };
            let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
            let report_builder = ReportBuilder::new(Arc::new(Watch::new(progress, bounds)), 300);
            let threads = bounded_threads(&report_builder, &unbounded().0);
            let priority_of = |stands_still| {
                reschedule(&report_builder, &threads, stands_still).map(|terms| terms.priority)
            };
            [true, false].map(priority_of)
        };
        assert_eq!(hurried(Priority::Low), [Some(Priority::Normal), Some(Priority::Low)]);
        for priority in [Priority::Normal, Priority::High] {
            assert_eq!(hurried(priority), [None, None]);
        }
    }
}
