//! A VM's state, in a few words.

use api::{HostVm, VmStatus, VmSummary};

use super::{Tone, eprint_line};

pub(crate) fn status(vm: &VmSummary) -> &'static str {
    word(vm.status)
}

/// The state of a VM in its host's census.
pub(crate) fn state(vm: &HostVm) -> (&'static str, Tone) {
    if vm.status == VmStatus::Running && vm.migration.is_some() {
        return ("moving", Tone::Calm);
    }
    let tone = match vm.status {
        VmStatus::Running => Tone::Good,
        VmStatus::Paused | VmStatus::Arriving => Tone::Calm,
        VmStatus::InDoubt | VmStatus::Unreadable | VmStatus::Dead => Tone::Bad,
    };
    (word(vm.status), tone)
}

fn word(status: VmStatus) -> &'static str {
    match status {
        VmStatus::Running => "running",
        VmStatus::Paused => "paused",
        VmStatus::Arriving => "arriving",
        VmStatus::InDoubt => "in doubt",
        VmStatus::Unreadable => "unreadable",
        VmStatus::Dead => "dead",
    }
}

/// Prints a VM's problem to standard error, because the command itself succeeded.
pub(crate) fn print_problem(vm: &VmSummary) {
    if let Some(problem) = &vm.problem {
        eprint_line(format_args!("droveway: note: {problem}"));
    }
}

/// A VM for tests.
#[cfg(test)]
pub(crate) fn example(name: &str) -> VmSummary {
    VmSummary {
        name: name.to_owned(),
        status: VmStatus::Running,
        pid: 4711,
        qemu: "10.0.2".to_owned(),
        ram_bytes: 1 << 30,
        free_page_hint: false,
        attached: false,
        migration: None,
        problem: None,
        share_domain: String::new(),
        content: None,
        helper: None,
        argv: vec!["qemu-system-x86_64".to_owned(), "-name".to_owned(), "it's".to_owned()],
    }
}
