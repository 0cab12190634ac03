//! The properties of this host's VMs that decide where they can move.

use std::path::Path;

use facts::host::VmFacts;
use host::quota;
use qemu::command_line::CommandLine;
use qemu::machine::Machine;
use qemu::outgoing;
use qemu::process::user_of;
use qemu::qmp::MemoryBackend;
use qemu::ram_blocks::RamBlocks;
use qemu::room::{HostMemory, Needs};
use qemu::shape::{self, Memory};

use crate::parallel::at_once;
use crate::vms::registry::{Living, Registry};

/// The facts of all VMs whose QEMU lives; this queries QEMU, and so may wait for a busy one.
pub(super) fn facts(registry: &Registry, memory: &HostMemory) -> Vec<VmFacts> {
    at_once(&registry.living(), |living| one(living, memory))
}

fn one(living: &Living, memory: &HostMemory) -> VmFacts {
    let Living { name, ram_bytes, machine } = living;
    let line = CommandLine::parse(&machine.argv).ok();
    let program = machine.argv.first().map(|program| absolute(program, &machine.cwd));
    let unreached = RamBlocks::of(machine).notes.join("; ");
    // Memory may have been plugged since.
    let ram_bytes = machine.qmp.ram_bytes().unwrap_or(*ram_bytes);
    let needs = needs(machine, ram_bytes, memory);
    let backends = machine.qmp.plugged_backends().unwrap_or_default();
    let hinted = shape::has_free_page_hint(&machine.qmp)
        .unwrap_or_else(|_| line.as_ref().is_some_and(CommandLine::has_free_page_hint));
    VmFacts {
        name: name.clone(),
        program: program.unwrap_or_default(),
        qemu: machine.qmp.version(),
        accelerator: line.as_ref().map(CommandLine::accelerator).unwrap_or_default(),
        machine: shape::machine_of(&machine.qmp).unwrap_or_default(),
        cpu: line.as_ref().and_then(CommandLine::cpu_model),
        ram_bytes: ram_bytes.max(backed_bytes(&backends, |_| true)),
        pages_bytes: needs.as_ref().map(|needs| needs.pages_bytes),
        huge_bytes: needs.map(|needs| needs.huge_bytes.into_iter().collect()).unwrap_or_default(),
        shared_bytes: backed_bytes(&backends, |backend| backend.share),
        free_page_hint: hinted,
        may_crash_at_reset: machine.may_crash_at_reset(),
        program_replaced: machine.runs_replaced_program(),
        runs_as_root: user_of(machine.process.pid()).is_ok_and(|user| user.uid == 0),
        taps: line
            .as_ref()
            .map(|line| {
                let taps = line.taps().into_iter().filter(|tap| tap.script.is_none());
                taps.map(|tap| tap.name).collect()
            })
            .unwrap_or_default(),
        environment: machine.missing_environment(),
        unthrottled: unthrottled(machine),
        cpu_weights: quota::cpu_weights(std::process::id(), machine.process.pid()),
        blockers: outgoing::blockers(&machine.qmp).unwrap_or_default(),
        loses_writes: machine.qmp.loses_writes().unwrap_or(false),
        unreached: Some(unreached).filter(|notes| !notes.is_empty()),
    }
}

/// Why the VM's vCPUs can't be throttled. None as well if QEMU doesn't report their threads.
fn unthrottled(machine: &Machine) -> Option<String> {
    let vcpus = machine.qmp.vcpus().ok()?;
    quota::check(machine.process.pid(), &vcpus).err().map(|error| error.to_string())
}

/// The memory of all backends that count, including a device's memory, which the host has to
/// provide as well.
fn backed_bytes(backends: &[MemoryBackend], counts: impl Fn(&MemoryBackend) -> bool) -> u64 {
    let counted = backends.iter().filter(|backend| counts(backend));
    counted.fold(0, |sum, backend| sum.saturating_add(backend.bytes))
}

/// The memory that a VM needs on any host; none if its QEMU or its command line doesn't show it.
pub(crate) fn needs(machine: &Machine, ram_bytes: u64, memory: &HostMemory) -> Option<Needs> {
    // If QEMU doesn't report what is unplugged, all of it counts.
    needs_without(machine, ram_bytes, memory, || machine.qmp.unplugged().unwrap_or_default())
}

/// The same for a QEMU that waits for its VM. Nothing is plugged there yet, so what will be
/// `unplugged` is only known from the source.
pub(crate) fn needs_of_arriving(
    machine: &Machine,
    ram_bytes: u64,
    memory: &HostMemory,
    unplugged: &[Memory],
) -> Option<Needs> {
    needs_without(machine, ram_bytes, memory, || unplugged.to_vec())
}

fn needs_without(
    machine: &Machine,
    ram_bytes: u64,
    memory: &HostMemory,
    unplugged: impl FnOnce() -> Vec<Memory>,
) -> Option<Needs> {
    let line = CommandLine::parse(&machine.argv).ok()?;
    let backends = machine.qmp.memory_backends().ok().filter(|backends| !backends.is_empty())?;
    let pieces: Vec<Memory> =
        backends.into_iter().map(|one| Memory { id: one.id, bytes: one.bytes }).collect();
    let listed = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.bytes));
    let mut needs = Needs::of(&line, &pieces, &unplugged(), &machine.cwd, memory);
    // Where QEMU doesn't list its base memory.
    needs.pages_bytes = needs.pages_bytes.saturating_add(ram_bytes.saturating_sub(listed));
    Some(needs)
}

/// The program's path, as another host would also find it.
pub(crate) fn absolute(program: &str, cwd: &Path) -> String {
    if program.contains('/') { cwd.join(program).display().to_string() } else { program.to_owned() }
}
