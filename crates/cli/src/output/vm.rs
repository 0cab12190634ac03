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

/// For tests.
#[cfg(test)]
pub(crate) fn example(name: &str) -> api::VmSummary {
    api::VmSummary {
        name: name.to_owned(),
        status: api::VmStatus::Running,
        pid: 4711,
        qemu: "10.0.2".to_owned(),
        ram_bytes: 1 << 30,
        attached: false,
        migration: None,
        problem: None,
        share_domain: String::new(),
        content: None,
        helper: None,
        argv: vec!["qemu-system-x86_64".to_owned(), "-name".to_owned(), "it's".to_owned()],
    }
}
