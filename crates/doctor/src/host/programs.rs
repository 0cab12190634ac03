//! QEMU's programs, and the QEMUs that run.

use std::collections::BTreeSet;

use facts::host::{Facts, Kvm, Program, VmFacts};
use facts::program::Capabilities;

use crate::{Findings, versions};

/// Judges the programs of a host, as far as its VMs use them, or those that may come.
pub(super) fn programs(facts: &Facts, coming: &[VmFacts], findings: &mut Findings) {
    let runs = |vms: &[VmFacts], program: &Program| vms.iter().any(|vm| is_of(vm, program));
    // The program in PATH is what a first VM would be started with.
    let is_first = facts.vms.is_empty() && coming.is_empty();
    for program in &facts.programs {
        let users = users(facts, program);
        let is_used = is_first || runs(&facts.vms, program);
        match &program.known {
            Some(known) => {
                let version = known.version_text();
                findings.ok("qemu", format!("QEMU {version}: {} ({users}).", program.name));
                if is_used || runs(coming, program) {
                    self::problems(known.version, uses_tcg(facts, &program.accelerator), findings);
                    newer(known, findings);
                }
            }
            None if is_used => {
                let why = program.problem.as_deref().unwrap_or("it was not queried");
                findings.warning(
                    "qemu",
                    format!("{} ({users}) doesn't answer: {why}.", program.name),
                    "install QEMU, or name the existing program in command lines",
                );
            }
            None => {}
        }
    }
    for vm in facts.vms.iter().filter(|vm| vm.qemu != (0, 0, 0)) {
        self::problems(vm.qemu, uses_tcg(facts, &vm.accelerator), findings);
    }
    // A script on the command line may start another QEMU now than it did then.
    let mut told = BTreeSet::new();
    for vm in facts.vms.iter().filter(|vm| !vm.program_replaced) {
        let Some(known) =
            facts.program(&vm.program, &vm.accelerator).and_then(|program| program.known.as_ref())
        else {
            continue;
        };
        if known.version != vm.qemu && told.insert(vm.qemu) {
            let (major, minor, micro) = vm.qemu;
            findings.note(
                "qemu",
                format!(
                    "{} runs with QEMU {major}.{minor}.{micro}, and {} is QEMU {} now.",
                    vm.name,
                    vm.program,
                    known.version_text()
                ),
                "a move brings it to the newer one",
            );
        }
    }
}

/// The known problems of a version.
fn problems(version: (u32, u32, u32), tcg: bool, findings: &mut Findings) {
    let (major, minor, micro) = version;
    for problem in versions::problems(version, tcg) {
        let text = format!("QEMU {major}.{minor}.{micro} {}.", problem.text);
        findings.add(problem.severity, "qemu", text, Some(problem.advice));
    }
}

/// What newer versions do in another way.
fn newer(known: &Capabilities, findings: &mut Findings) {
    if known.legacy_ack {
        findings.note(
            "qemu",
            format!(
                "QEMU {} lets an agent decide when a VM stops only if it was started with \
                 `migration.switchover-ack-legacy=on` (agents do that), or with a machine type up \
                 to 11.0. Other VMs are stopped by QEMU itself.",
                known.version_text()
            ),
            "start them with -global migration.switchover-ack-legacy=on",
        );
    }
    if let Some(unknown) = versions::unknown(known) {
        findings.note("qemu", unknown, "try a move with a VM that matters little first");
    }
}

/// Counts the VMs that an upgrade of QEMU's package has not reached.
pub(super) fn replaced_programs(facts: &Facts, findings: &mut Findings) {
    let replaced = facts.vms.iter().filter(|vm| vm.program_replaced);
    let names: Vec<&str> = replaced.map(|vm| vm.name.as_str()).collect();
    let [first, others @ ..] = &names[..] else { return };
    let who = match others.len() {
        0 => format!("The QEMU of {first} runs a program that was"),
        more => format!("The QEMUs of {first} and {more} more run programs that were"),
    };
    findings.note(
        "qemu",
        format!("{who} replaced on disk since: what the new one fixes is not fixed there."),
        "a move to a host with the new program brings a VM to it, and so does a stop and a new \
         start; `droveway list` names them",
    );
}

pub(super) fn moved_by_earlier_agents(facts: &Facts, findings: &mut Findings) {
    for vm in facts.vms.iter().filter(|vm| vm.may_crash_at_reset) {
        findings.warning(
            "qemu",
            format!(
                "{}: an earlier Droveway moved it here, and its QEMU may crash when the guest \
                 reboots or resets a virtio network card.",
                vm.name
            ),
            "move it once more before that, to a host whose agent has this version",
        );
    }
}

/// QEMUs next to those of VMs. Each text has what to do.
pub(super) fn left_over(facts: &Facts, findings: &mut Findings) {
    for left in &facts.left_over {
        findings.warning("qemu", format!("{left}."), "");
    }
}

fn is_of(vm: &VmFacts, program: &Program) -> bool {
    vm.program == program.name && vm.accelerator == program.accelerator
}

/// The VMs that use a program.
fn users(facts: &Facts, program: &Program) -> String {
    let of_it = facts.vms.iter().filter(|vm| is_of(vm, program));
    let names: Vec<&str> = of_it.map(|vm| vm.name.as_str()).collect();
    match names.as_slice() {
        [] => "in PATH".to_owned(),
        [name] => format!("{}, {name}", program.accelerator),
        [first, ..] => format!("{}, {first} and {} more", program.accelerator, names.len() - 1),
    }
}

fn uses_tcg(facts: &Facts, accelerator: &str) -> bool {
    // Of a host whose KVM the agent can't see, no lack of it is assumed.
    let has_kvm = matches!(facts.kvm, Kvm::Usable | Kvm::Unknown);
    !(accelerator.starts_with("kvm") && has_kvm)
}
