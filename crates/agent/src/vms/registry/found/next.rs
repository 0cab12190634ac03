//! The next QEMU of a VM that was getting one on this host when the agent ended.

use std::path::Path;

use qemu::machine::{self, StartError};
use qemu::process::ProcessError;
use qemu::qmp::{QmpError, RunState};

use super::{Held, nobody_listens};
use crate::vms::record::{self, Record, RecordError};

/// Whether a journal decides about the next QEMU of a VM. Without one it never had the VM, and is
/// ended, with what was made for it; where that isn't known, it is not touched.
pub(super) fn look(name: &str, dir: &Path, held: &Held) -> bool {
    let next = match Record::read_next(dir) {
        Ok(next) => next,
        Err(RecordError::Missing(_)) => return false,
        Err(error) => {
            leave_alone(name, &error.to_string());
            return held.names(name);
        }
    };
    let is_held = next.machine.as_ref().is_some_and(|recorded| held.holds(name, recorded));
    let now = match Record::read(dir) {
        Ok(now) => now,
        Err(_) if is_held => return true,
        Err(error) => {
            leave_alone(name, &error.to_string());
            return false;
        }
    };
    let has_it = |recorded: &machine::Record| {
        now.machine.as_ref().is_some_and(|machine| machine.is_of(recorded))
    };
    // Also with a journal: its thread finds the VM where it is to be, and removes nothing.
    if next.machine.as_ref().is_some_and(has_it) {
        record::remove_next(dir);
        return false;
    }
    if is_held {
        return true;
    }
    let home = match &next.machine {
        Some(_) => next.home(dir),
        None => record::other_seat(dir, &now.home(dir)),
    };
    match end(&next, &home) {
        Ok(()) => {
            tracing::info!(vm = name, "it was getting another QEMU when the agent ended: removed");
            record::remove_next(dir);
            if home != now.home(dir) {
                record::clear_seat(dir, &home);
            }
        }
        Err(why) => leave_alone(name, &why),
    }
    false
}

fn leave_alone(name: &str, why: &str) {
    tracing::error!(vm = name, why, "not touching the next QEMU of a VM, which does not have it");
}

/// Ends a QEMU that waits for its VM, if it lives.
fn end(next: &Record, home: &Path) -> Result<(), String> {
    let found = match &next.machine {
        Some(recorded) => machine::reopen(recorded, home),
        None => machine::attach(&home.join("qmp"), home),
    };
    let machine = match found {
        Ok(machine) => machine,
        Err(StartError::Process(ProcessError::Exited { .. })) => return Ok(()),
        Err(StartError::Qmp(QmpError::Connect { source, .. }))
            if next.machine.is_none() && nobody_listens(&source) =>
        {
            return Ok(());
        }
        Err(error) => return Err(error.to_string()),
    };
    // The VM's own QEMU has the same listening sockets.
    machine.is_one_of_two(true);
    match machine.qmp.run_state() {
        Ok(RunState::InMigrate) => machine.quit().map_err(|error| error.to_string()),
        Ok(state) => Err(format!("it is {state}, where it should wait for the VM")),
        Err(error) => Err(error.to_string()),
    }
}
