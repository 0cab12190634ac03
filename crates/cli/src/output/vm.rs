//! A VM's problem, next to the output of a command that succeeded.

use api::VmSummary;

use super::eprint_line;

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
        status: api::VmStatus::Running,
        pid: 4711,
        qemu: "10.0.2".to_owned(),
        program_replaced: false,
        ram_bytes: 1 << 30,
        free_page_hint: false,
        attached: false,
        migration: None,
        problem: None,
        left_over: None,
        share_domain: String::new(),
        content: None,
        helper: None,
        argv: vec!["qemu-system-x86_64".to_owned(), "-name".to_owned(), "it's".to_owned()],
    }
}
