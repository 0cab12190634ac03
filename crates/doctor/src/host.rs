//! One host.

mod programs;
mod weights;

use api::{Finding, Severity};

use crate::{Findings, size};
use facts::host::{Carries, Facts, Kvm, Nic, VmFacts};
use programs::{left_over, moved_by_earlier_agents, programs, replaced_programs};
use weights::cpu_weights;

/// Room for a few reports and logs; with less, writing VMs' records may fail.
const STATE_FREE_MIN: u64 = 64 << 20;
/// Less free space than this fraction of the file system is little: something fills it.
const STATE_PARTS: u64 = 20;
/// Of a small file system even a larger fraction is little, and of a large one a smaller fraction
/// is enough.
const STATE_FREE_LITTLE: std::ops::RangeInclusive<u64> = 1 << 30..=8 << 30;
/// Less free memory than this fraction of all memory is little.
const MEMORY_PARTS: u64 = 20;
/// Shared memory from this size on makes a move costly, unless the guest reports what is free.
const SHARED_LEAST: u64 = 1 << 30;
/// Settings of the kernel that give QEMU's shared memory huge pages.
const WITH_HUGE_PAGES: [&str; 4] = ["always", "within_size", "advise", "force"];
/// Clock sources that cost a system call each time, and drift.
const SLOW_CLOCKS: [&str; 3] = ["hpet", "acpi_pm", "jiffies"];

/// What it means that a VM can't be throttled, and what to do about the most frequent reason.
const UNTHROTTLED: &str = "a move of a VM that writes faster than its memory is sent is cancelled, \
                           or has a longer downtime (--on-stall); a unit gets a cpu controller by \
                           CPUWeight= or Delegate=yes";

/// What to do about a VM with a device that QEMU can't migrate.
pub(crate) const BLOCKED: &str =
    "unplug that device, or shut the VM down here and start it at the other host";

/// Judges the facts of one host.
#[must_use]
pub fn of_host(facts: &Facts) -> Vec<Finding> {
    let mut findings = Findings::of(&facts.host);
    findings.list = of_destination(facts, &[]);
    for (vm, reason) in facts.vms.iter().flat_map(|vm| vm.blockers.iter().map(move |why| (vm, why)))
    {
        findings.warning("vm", format!("{} can't be moved: {reason}.", vm.name), BLOCKED);
    }
    findings.list
}

/// Judges the facts of a host to which these VMs may come.
pub(crate) fn of_destination(facts: &Facts, coming: &[VmFacts]) -> Vec<Finding> {
    let mut findings = Findings::of(&facts.host);
    findings.ok("droveway", format!("Droveway {}, Linux {}.", facts.droveway, facts.kernel));
    programs(facts, coming, &mut findings);
    replaced_programs(facts, &mut findings);
    moved_by_earlier_agents(facts, &mut findings);
    left_over(facts, &mut findings);
    kvm(facts, &mut findings);
    user(facts, &mut findings);
    reach(facts, &mut findings);
    cgroups(facts, &mut findings);
    cpu_weights(facts, &mut findings);
    clock(facts, &mut findings);
    memory(facts, &mut findings);
    huge_pages(facts, &mut findings);
    state(facts, &mut findings);
    for nic in &facts.nics {
        self::nic(nic, &mut findings);
    }
    network(facts, &mut findings);
    passwords(facts, &mut findings);
    if let Some(carries) = &facts.carries {
        carrying(carries, &mut findings);
    }
    findings.list
}

fn carrying(carries: &Carries, findings: &mut Findings) {
    if let Some(why) = &carries.refused {
        findings.error(
            "carry",
            format!("Migrations over unix sockets fail here: {why}."),
            "the packages' units allow it: compare yours, and restart the agent",
        );
    }
    waiting(carries, findings);
    if let Some(manager) = &carries.manager {
        if carries.missing.is_empty() {
            findings.ok("carry", format!("Migrations of {manager} are carried."));
            return;
        }
        findings.warning(
            "carry",
            format!(
                "Migrations of {manager} from here bypass the agents: {}.",
                carries.missing.join("; ")
            ),
            "correct that; if the agent started before its manager's directory existed, restart \
             the agent",
        );
        return;
    }
    if !carries.missing.is_empty() {
        findings.warning(
            "carry",
            format!(
                "Migrations that libvirt on other hosts sends here bypass the agents: qemu.conf \
                 lacks {}.",
                carries.missing.join(", ")
            ),
            "run `droveway libvirt setup`, then restart libvirtd, or virtqemud",
        );
        return;
    }
    let who = if carries.libvirt { "libvirt" } else { "the program that manages its QEMUs" };
    let user = carries.qemu_user.as_deref().unwrap_or("root");
    findings.ok(
        "carry",
        format!(
            "Migrations of {who} are carried, for QEMUs of the user {user}, with sockets in {}.",
            carries.directory
        ),
    );
}

/// A QEMU that waits for a VM can't tell who connects.
fn waiting(carries: &Carries, findings: &mut Findings) {
    const LOADS: &str = "loads what the first connection sends, from any sender";
    if let Some(address) = &carries.open_address {
        findings.warning(
            "carry",
            format!("QEMUs wait for VMs at {address}, where other hosts reach them: each {LOADS}."),
            "remove `address` from [carry], restart the agent, run `droveway libvirt setup` again \
             and restart libvirtd; or let only this host reach these ports, as \
             droveway-incoming.nft does (firewalls are not examined)",
        );
    } else if !carries.open_ports.is_empty() {
        let ports: Vec<String> = carries.open_ports.iter().map(u16::to_string).collect();
        findings.warning(
            "carry",
            format!(
                "A QEMU waits for a VM at port {}, where other hosts reach it: it {LOADS}.",
                ports.join(", ")
            ),
            "unless the migration has --listen-address: does qemu.conf have the lines of `droveway \
             libvirt setup`, and was libvirtd restarted since?",
        );
    }
}

fn kvm(facts: &Facts, findings: &mut Findings) {
    let of_vms = facts.vms.iter().filter(|vm| vm.accelerator == "kvm").count();
    match &facts.kvm {
        Kvm::Unknown => {}
        Kvm::Usable => findings.ok("kvm", "KVM can be used."),
        Kvm::Missing => findings.warning(
            "kvm",
            format!(
                "There is no /dev/kvm: VMs run under TCG here, many times slower, and none that \
                 needs KVM can arrive{}.",
                if of_vms > 0 { " any more" } else { "" }
            ),
            "switch virtualization on in the firmware and load kvm_intel or kvm_amd; in a VM, \
             allow nested virtualization",
        ),
        Kvm::Denied(why) => findings.warning(
            "kvm",
            format!("/dev/kvm can't be opened ({why}): VMs that need KVM can't start here."),
            "run the agent as root, or as a user of the group kvm",
        ),
    }
}

fn user(facts: &Facts, findings: &mut Findings) {
    let about = "QEMU's user";
    let advice = "give them a user of their own: --qemu-user NAME, who has to be allowed to open \
                  the VMs' images, and /dev/kvm; VMs keep theirs until they are moved or started \
                  again";
    let of_root: Vec<&str> =
        facts.vms.iter().filter(|vm| vm.runs_as_root).map(|vm| vm.name.as_str()).collect();
    if let [first, others @ ..] = &of_root[..] {
        let who = match others.len() {
            0 => format!("The QEMU of {first} runs"),
            more => format!("The QEMUs of {first} and {more} more run"),
        };
        let text = format!("{who} as root: a guest that breaks out of its QEMU owns the host.");
        findings.warning(about, text, advice);
        if facts.qemu_user.root {
            return;
        }
    }
    match (facts.qemu_user.root, facts.qemu_user.chosen) {
        (true, _) => findings.note(
            about,
            "QEMUs are started as root, unless a command line names another user: a guest that \
             breaks out of one owns the host.",
            advice,
        ),
        (false, true) => findings.ok(about, "QEMUs are started as a user of their own."),
        (false, false) => findings.ok(about, "QEMUs are started as the agent's user."),
    }
}

fn reach(facts: &Facts, findings: &mut Findings) {
    let reach = facts.reach;
    let advice = "run the agent as root with CAP_SYS_PTRACE, or with AmbientCapabilities=\
                  CAP_SYS_PTRACE in its unit";
    match (reach.ptrace, reach.yama) {
        (_, Some(3..)) => findings.warning(
            "memory access",
            "Yama forbids access to QEMU's memory (ptrace_scope is 3): pages go through QEMU's \
             stream, which is slower.",
            "set kernel.yama.ptrace_scope to 2 or less; that takes a reboot",
        ),
        (true, _) => findings.ok("memory access", "Pages are written to QEMU's memory directly."),
        (false, Some(2)) => findings.warning(
            "memory access",
            "Yama denies the agent access to QEMU's memory: pages go through QEMU's stream, which \
             is slower.",
            advice,
        ),
        (false, Some(1)) => findings.note(
            "memory access",
            "The agent reaches the memory of QEMUs of its own user that it started itself; after \
             a restart of the agent, and for other QEMUs, pages go through QEMU's stream, which \
             is slower.",
            advice,
        ),
        (false, _) => findings.note(
            "memory access",
            "The agent reaches the memory of QEMUs of its own user; for others pages go through \
             QEMU's stream, which is slower.",
            advice,
        ),
    }
    for vm in &facts.vms {
        if vm.shared_bytes >= SHARED_LEAST && !vm.free_page_hint {
            findings.note(
                "memory access",
                format!(
                    "{}: QEMU reads all {} of its shared memory when it moves, and so allocates \
                     what the guest never used.",
                    vm.name,
                    size(vm.shared_bytes)
                ),
                "start it with --free-page-hint, if its guest's kernel has init_on_alloc=0",
            );
        }
        if let Some(why) = &vm.unreached {
            let text = format!("{}: {why}.", vm.name);
            findings.note("memory access", text, "");
        }
    }
}

fn cgroups(facts: &Facts, findings: &mut Findings) {
    let cgroups = &facts.cgroups;
    let shown = |version| format!("cgroup v{version}, the agent is in {}", cgroups.path);
    match cgroups.version {
        _ if cgroups.forbidden => {
            let text = "The agent's file has `cgroups = false`, so no VM is throttled.";
            findings.note("cgroups", text, UNTHROTTLED);
            return;
        }
        None => findings.note("cgroups", "There are no control groups.", UNTHROTTLED),
        Some(version) if cgroups.delegated => {
            let controllers = cgroups.controllers.join(", ");
            findings.ok("cgroups", format!("{}, may make groups ({controllers}).", shown(version)));
        }
        Some(version) => findings.note(
            "cgroups",
            format!("{}, and may not make groups there.", shown(version)),
            "throttling needs it: Delegate=yes in the agent's unit allows it",
        ),
    }
    for vm in &facts.vms {
        if let Some(why) = &vm.unthrottled {
            let text = format!("{} can't be throttled: {why}.", vm.name);
            findings.note("cgroups", text, UNTHROTTLED);
        }
    }
}

fn clock(facts: &Facts, findings: &mut Findings) {
    let Some(source) = &facts.clock_source else { return };
    if SLOW_CLOCKS.contains(&source.as_str()) {
        findings.warning(
            "clock",
            format!("The kernel takes the time from {source}: guests' clocks are slow or drift."),
            "the kernel's log shows why it doesn't trust the TSC",
        );
    } else {
        findings.ok("clock", format!("The kernel takes the time from {source}."));
    }
}

fn memory(facts: &Facts, findings: &mut Findings) {
    let memory = &facts.memory;
    let Some(available) = memory.available_bytes else { return };
    let mut text = format!("{} of {} free", size(available), size(memory.total_bytes));
    if memory.swap_free_bytes > 0 {
        text += &format!(", {} of swap", size(memory.swap_free_bytes));
    }
    for huge in &memory.huge {
        text += &format!(
            ", {} of {} huge pages of {} KiB",
            huge.free,
            huge.total,
            huge.page_bytes >> 10
        );
    }
    text += ".";
    if available < memory.total_bytes / MEMORY_PARTS {
        findings.warning("memory", text, "arriving VMs need room: stop or move others");
    } else {
        findings.ok("memory", text);
    }
}

fn huge_pages(facts: &Facts, findings: &mut Findings) {
    let Some(setting) = &facts.shared_huge_pages else { return };
    if WITH_HUGE_PAGES.contains(&setting.as_str()) {
        return;
    }
    for vm in &facts.vms {
        let huge = vm.huge_bytes.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        // Which of them are shared isn't known.
        let shared = vm.shared_bytes.saturating_sub(huge);
        if shared >= SHARED_LEAST {
            findings.note(
                "memory",
                format!(
                    "{}: its {} of shared memory have no huge pages, since shmem_enabled is \
                     {setting}.",
                    vm.name,
                    size(shared)
                ),
                "write `advise` to /sys/kernel/mm/transparent_hugepage/shmem_enabled before the VM \
                 starts or arrives, or use hugetlbfs",
            );
        }
    }
}

fn state(facts: &Facts, findings: &mut Findings) {
    let path = &facts.state.path;
    match facts.state.free_bytes {
        None => {}
        Some(free) if free < STATE_FREE_MIN => findings.error(
            "state",
            format!("{path} has {} free: VMs' records and journals can't be written.", size(free)),
            "make room there, or give the agent another --state",
        ),
        Some(free) if free < state_little(facts.state.total_bytes) => findings.warning(
            "state",
            format!(
                "{path} has {} of {} free: when it is full, no VM can start, arrive or leave.",
                size(free),
                size(facts.state.total_bytes)
            ),
            "make room on its file system",
        ),
        Some(free) => findings.ok("state", format!("{path} has {} free.", size(free))),
    }
}

/// The free space in the state directory below which it is little.
fn state_little(total_bytes: u64) -> u64 {
    (total_bytes / STATE_PARTS).clamp(*STATE_FREE_LITTLE.start(), *STATE_FREE_LITTLE.end())
}

fn nic(nic: &Nic, findings: &mut Findings) {
    let Nic { address, name, .. } = nic;
    if let Some(why) = &nic.problem {
        findings.error(
            "network card",
            format!("{address} can't be used: {why}."),
            "name addresses of this host",
        );
        return;
    }
    let mtu = nic.mtu.map_or_else(String::new, |mtu| format!(", MTU {mtu}"));
    match nic.speed_bytes_per_s {
        Some(speed) => {
            let who = if nic.said { ", as configured" } else { "" };
            let mbit = speed / 125_000;
            findings.ok("network card", format!("{name} ({address}): {mbit} Mbit/s{who}{mtu}."));
        }
        None => findings.note(
            "network card",
            format!("{name} ({address}) doesn't report its speed{mtu}: it is learned."),
            &format!(
                "set its speed, so that migrations leave room for other traffic: --nic-speed \
                 {address}=1G"
            ),
        ),
    }
    if nic.mtu.is_some_and(|mtu| mtu < 1280) {
        findings.warning(
            "network card",
            format!("{name} takes packets of {} bytes only.", nic.mtu.unwrap_or(0)),
            "give it an MTU of 1500 or more",
        );
    }
}

fn passwords(facts: &Facts, findings: &mut Findings) {
    for exposure in &facts.exposed {
        findings.warning(
            "passwords",
            format!("A password is exposed: {exposure}."),
            "put the URL into a file of mode 0600, which `directory-file`, or `url-file` under \
             [webhook], names; and change the password",
        );
    }
}

fn network(facts: &Facts, findings: &mut Findings) {
    let listen = &facts.network.listen;
    if let Some(warning) = &facts.network.certificate {
        let (severity, refuse) = match facts.network.certificate_refused {
            true => (Severity::Error, "refuse this one"),
            false => (Severity::Warning, "will refuse this one soon"),
        };
        findings.add(
            severity,
            "encryption",
            format!("Other agents {refuse}: {warning}."),
            Some(
                "`droveway ca issue HOST --replace`, and copy its files again: the agent reads \
                 them within half a minute; a pod of KubeVirt reads them when it starts",
            ),
        );
    }
    if facts.network.loopback {
        findings.note(
            "encryption",
            format!("The agent listens at {listen}: only this host reaches it."),
            "to move VMs between hosts, listen at an address of a network of your own",
        );
    } else if facts.network.plaintext {
        findings.add(
            Severity::Warning,
            "encryption",
            format!(
                "The agent listens at {listen} with --insecure-plaintext: anyone who reaches that \
                 port can start programs here, and guest memory crosses the network unencrypted."
            ),
            Some("let only agents reach that port, over a network of your own"),
        );
    } else {
        findings.ok("encryption", format!("The agent listens at {listen}, encrypted."));
    }
}

#[cfg(test)]
mod tests;
