//! The VMs here, as far as it decides where they can go.

use std::path::Path;

use facts::host::VmFacts;
use qemu::command_line::CommandLine;
use qemu::machine::Machine;
use qemu::qmp::MemoryBackend;
use qemu::ram_blocks::RamBlocks;
use qemu::shape;

use super::at_once;
use crate::registry::{Living, Registry};

/// Those whose QEMU lives. It is asked, so this may wait for one that is busy.
pub(super) fn facts(registry: &Registry) -> Vec<VmFacts> {
    at_once(&registry.living(), one)
}

fn one(living: &Living) -> VmFacts {
    let Living { name, ram_bytes, machine } = living;
    let line = CommandLine::parse(&machine.argv).ok();
    let program = machine.argv.first().map(|program| absolute(program, &machine.cwd));
    let unreached = RamBlocks::of(machine).notes.join("; ");
    VmFacts {
        name: name.clone(),
        program: program.unwrap_or_default(),
        qemu: machine.qmp.version(),
        accelerator: line.as_ref().map(CommandLine::accelerator).unwrap_or_default(),
        machine: shape::machine_of(&machine.qmp).unwrap_or_default(),
        cpu: line.as_ref().and_then(CommandLine::cpu_model),
        ram_bytes: (*ram_bytes).max(backed_bytes(machine, |_| true)),
        shared_bytes: backed_bytes(machine, |backend| backend.share),
        free_page_hint: line.as_ref().is_some_and(CommandLine::has_free_page_hint),
        unreached: Some(unreached).filter(|notes| !notes.is_empty()),
    }
}

/// With memory that is a device's and not the guest's RAM: it takes as much.
fn backed_bytes(machine: &Machine, counts: impl Fn(&MemoryBackend) -> bool) -> u64 {
    let backends = machine.qmp.memory_backends().unwrap_or_default();
    let counted = backends.iter().filter(|backend| counts(backend));
    counted.fold(0, |sum, backend| sum.saturating_add(backend.bytes))
}

/// As another host, too, would find it.
pub(crate) fn absolute(program: &str, cwd: &Path) -> String {
    if program.contains('/') { cwd.join(program).display().to_string() } else { program.to_owned() }
}
