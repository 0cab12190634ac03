//! VMs that an earlier run of the agent left: met again, or cleaned up after.

use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread;

use qemu::machine::{self, Machine};
use qemu::qmp::RunState;

use super::{images, remove_dir};
use crate::name;
use crate::state::StateDir;
use crate::vm::{Record, Standing, Vm, unrecorded, with_log};

/// VMs whose switchover an earlier run of the agent left in the middle, with
/// their QEMUs; without, whichever QEMU has the name.
#[derive(Debug, Default)]
pub(crate) struct Held(pub(crate) Vec<(String, Option<machine::Record>)>);

impl Held {
    fn holds(&self, name: &str, recorded: &machine::Record) -> bool {
        let is_it = |machine: &Option<machine::Record>| {
            machine.as_ref().is_none_or(|machine| machine.is_of(recorded))
        };
        self.0.iter().any(|(vm, machine)| vm == name && is_it(machine))
    }
}

/// A VM that was found again.
pub(super) struct Found {
    pub(super) vm: Vm,
    pub(super) held: bool,
}

/// Every VM of the state directory.
pub(super) fn all(state: &StateDir, held: &Held) -> io::Result<Vec<Found>> {
    let mut dirs = Vec::new();
    for entry in fs::read_dir(state.vms())? {
        let entry = entry?;
        let named = entry.file_name().into_string().ok().filter(|n| name::check(n).is_ok());
        match named {
            Some(name) if entry.file_type()?.is_dir() => dirs.push((name, entry.path())),
            _ => tracing::warn!(path = %entry.path().display(), "not a VM; left alone"),
        }
    }
    thread::scope(|scope| {
        // At once: a QEMU that does not answer costs seconds.
        let mut finders = Vec::new();
        for (name, dir) in dirs {
            let thread = thread::Builder::new().name(format!("find-{name}"));
            finders.push(thread.spawn_scoped(scope, move || one(&name, dir, held))?);
        }
        Ok(finders
            .into_iter()
            .filter_map(|finder| finder.join().unwrap_or_else(|fault| resume_unwind(fault)))
            .collect())
    })
}

fn one(name: &str, dir: PathBuf, held: &Held) -> Option<Found> {
    let record = match Record::read(&dir) {
        Ok(record) => record,
        Err(error) => {
            tracing::warn!(vm = name, %error, "its record can't be read");
            Record::starting()
        }
    };
    let Some(recorded) = &record.machine else {
        // Nobody was told that it runs: whoever asked for it heard an error.
        discard(name, unrecorded(&dir).ok());
        images::remove(&dir);
        remove_dir(&dir);
        return None;
    };
    if held.holds(name, recorded) {
        let vm = match machine::reopen(recorded, &dir) {
            Ok(machine) => {
                let ram_bytes = machine.qmp.ram_bytes().unwrap_or(record.ram_bytes);
                Vm::new(name, dir, machine, ram_bytes).within(&record.share_domain)
            }
            Err(error) => {
                let why = with_log(&error.to_string(), &dir.join("qemu.log"));
                Vm::lost(name, dir, record, why)
            }
        };
        return Some(Found { vm, held: true });
    }
    let machine = match machine::reopen(recorded, &dir) {
        Ok(machine) => machine,
        Err(_) if record.standing == Standing::Arriving => {
            images::remove(&dir);
            remove_dir(&dir);
            return None;
        }
        Err(error) => {
            let why = with_log(&error.to_string(), &dir.join("qemu.log"));
            tracing::info!(vm = name, why, "not found again");
            return Some(Found { vm: Vm::lost(name, dir, record, why), held: false });
        }
    };
    if record.standing == Standing::Arriving && !runs(&machine) {
        tracing::info!(vm = name, "it was arriving when the agent ended; removed");
        discard(name, Some(machine));
        images::remove(&dir);
        remove_dir(&dir);
        return None;
    }
    Some(Found { vm: meet(name, dir, machine, &record), held: false })
}

fn meet(name: &str, dir: PathBuf, machine: Machine, record: &Record) -> Vm {
    let ram_bytes = machine.qmp.ram_bytes().unwrap_or(record.ram_bytes);
    let vm = Vm::new(name, dir, machine, ram_bytes).within(&record.share_domain);
    tracing::info!(vm = name, "found again");
    if let Some(machine) = vm.machine() {
        vm.make_up(&machine);
    }
    if record.standing != Standing::Here && vm.save(Standing::Here).is_err() {
        tracing::warn!(vm = name, "its record can't be written");
    }
    vm
}

/// Only a VM that its source gave up runs; one that runs must never be ended
/// because of a record that came too late.
fn runs(machine: &Machine) -> bool {
    !matches!(
        machine.qmp.run_state(),
        Ok(RunState::InMigrate | RunState::Paused | RunState::Prelaunch) | Err(_)
    )
}

fn discard(name: &str, machine: Option<Machine>) {
    if let Some(machine) = machine
        && let Err(error) = machine.quit()
    {
        tracing::error!(vm = name, %error, "a QEMU of an earlier run can't be ended");
    }
}
