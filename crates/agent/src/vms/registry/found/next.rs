//! The next QEMU of a VM that was getting one on this host when the agent ended.

use std::path::Path;

use qemu::machine::{self, StartError};
use qemu::process::ProcessError;
use qemu::qmp::RunState;

use super::{Held, reach, unrecorded};
use crate::vms::record::{self, Record, RecordError};

/// What is known of a VM's next QEMU.
pub(super) struct Next {
    /// Whether a journal decides about it.
    pub(super) is_held: bool,
    /// Why it is left alone, and what to do; none if it has ended, or a journal decides about it.
    pub(super) left_over: Option<String>,
}

impl Next {
    fn held(is_held: bool) -> Self {
        Self { is_held, left_over: None }
    }

    /// One that may have the VM. `seat` has its record, if that can be read, and its directory.
    fn alone(name: &str, seat: Option<(&Record, &Path)>, why: &str) -> Self {
        log_alone(name, why);
        let socket = seat.map(|(_, home)| home.join("qmp").display().to_string());
        let socket = socket.unwrap_or_else(|| "SOCKET".to_owned());
        let pid = seat.and_then(|(next, _)| Some(next.machine.as_ref()?.pid()));
        let which = match (seat, pid) {
            (_, Some(pid)) => format!("process {pid}"),
            (Some(_), None) => format!("the process that has {socket} open"),
            (None, None) => "its process is not known".to_owned(),
        };
        let left_over = format!(
            "An upgrade of {name} left a QEMU ({which}), and no journal shows whether it has \
             {name}: {why}. The agent neither ends nor uses it, and upgrades {name} only when it \
             has ended. If {name} runs without it: end that process, and restart the agent. If \
             {name} is dead: `droveway attach NAME --qmp {socket}` adopts it under another name; \
             stop that one before {name}, since `droveway stop {name}` removes the socket"
        );
        Self { is_held: false, left_over: Some(left_over) }
    }
}

/// Finds the next QEMU of a VM. Without a journal it never had the VM, and is ended, with what was
/// made for it; where that isn't known, it is not touched.
pub(super) fn look(name: &str, dir: &Path, held: &Held) -> Next {
    let next = match Record::read_next(dir) {
        Ok(next) => next,
        Err(RecordError::Missing(_)) => return Next::held(false),
        Err(error) if held.names(name) => {
            log_alone(name, &error.to_string());
            return Next::held(true);
        }
        Err(error) => return Next::alone(name, None, &error.to_string()),
    };
    let is_held = next.machine.as_ref().is_some_and(|recorded| held.holds(name, recorded));
    let now = match Record::read(dir) {
        Ok(now) => now,
        Err(_) if is_held => return Next::held(true),
        Err(error) => {
            let home = next.home(dir);
            let seat = next.machine.is_some().then_some((&next, home.as_path()));
            return Next::alone(name, seat, &error.to_string());
        }
    };
    let has_it = |recorded: &machine::Record| {
        now.machine.as_ref().is_some_and(|machine| machine.is_of(recorded))
    };
    // Also with a journal: its thread finds the VM where it is to be, and removes nothing.
    if next.machine.as_ref().is_some_and(has_it) {
        record::remove_next(dir);
        return Next::held(false);
    }
    if is_held {
        return Next::held(true);
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
        Err(why) => return Next::alone(name, Some((&next, home.as_path())), &why),
    }
    Next::held(false)
}

fn log_alone(name: &str, why: &str) {
    tracing::error!(vm = name, why, "not touching the next QEMU of a VM, which does not have it");
}

/// Ends a QEMU that waits for its VM, if it lives.
fn end(next: &Record, home: &Path) -> Result<(), String> {
    let found = match &next.machine {
        Some(recorded) => reach(|| machine::reopen(recorded, home)).map(Some),
        None => unrecorded(home),
    };
    let machine = match found {
        Ok(Some(machine)) => machine,
        Ok(None) | Err(StartError::Process(ProcessError::Exited { .. })) => return Ok(()),
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
