//! A VM, in a few words.

pub(crate) fn status(vm: &api::VmSummary) -> &'static str {
    match vm.status {
        api::VmStatus::Running => "running",
        api::VmStatus::Paused => "paused",
        api::VmStatus::Arriving => "arriving",
        api::VmStatus::InDoubt => "in doubt",
        api::VmStatus::Unreadable => "unreadable",
        api::VmStatus::Dead => "dead",
    }
}

/// What is wrong with it goes to standard error, since the command succeeded.
pub(crate) fn print_problem(vm: &api::VmSummary) {
    if let Some(problem) = &vm.problem {
        eprintln!("droveway: note: {problem}");
    }
}
