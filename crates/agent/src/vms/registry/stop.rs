//! Ending a VM: by a shutdown of its guest, or by ending QEMU.

use std::time::{Duration, Instant};

use api::{StopEnd, StopHow, Stopped, VmStatus};
use qemu::machine::Machine;
use qemu::qmp::{QmpError, RunState};
use serde_json::json;

use super::Registry;
use super::slot::Busy;
use crate::denied::Denied;

impl Registry {
    /// Ends a VM and forgets it; blocks for as long as `how` allows.
    pub(crate) fn stop(&self, name: &str, how: StopHow) -> Result<Stopped, Denied> {
        api::check_stop(how.timeout_s).map_err(Denied::Invalid)?;
        let vm = self.set_busy(name, Busy::Stopping)?;
        // Updates whether QEMU lives; the last known state may be old.
        vm.status(false);
        let end = match vm.machine() {
            None => Ok(StopEnd::WasDead),
            Some(machine) => stop(name, &machine, how),
        };
        match end {
            Ok(end) => {
                tracing::info!(vm = name, ?end, "stopped");
                self.remove(name);
                Ok(Stopped { end })
            }
            Err(denied) => {
                self.set_free(name);
                Err(denied)
            }
        }
    }

    /// Whether a VM runs now.
    pub(crate) fn is_running(&self, name: &str) -> bool {
        self.show(name).is_ok_and(|vm| vm.status == VmStatus::Running)
    }
}

fn stop(name: &str, machine: &Machine, how: StopHow) -> Result<StopEnd, Denied> {
    let end = if how.force {
        StopEnd::PlugPulled
    } else {
        press_button(name, machine, Duration::from_secs(how.timeout_s))?
    };
    machine.quit().map_err(|error| Denied::Local(error.to_string()))?;
    Ok(end)
}

/// Asks the guest to shut down and waits until it has.
fn press_button(name: &str, machine: &Machine, timeout: Duration) -> Result<StopEnd, Denied> {
    match machine.qmp.run_state() {
        Ok(RunState::Running | RunState::Suspended) => {}
        // The guest is off, and QEMU waits or has just ended.
        Ok(RunState::Shutdown) | Err(QmpError::Closed) => return Ok(StopEnd::ShutDown),
        Ok(state) => {
            return Err(Denied::Conflict(format!(
                "{name} is {state} and can't react to its power button: let it run first, or end \
                 it with --force"
            )));
        }
        Err(error) => {
            return Err(Denied::Qemu(format!("{error}; `--force` ends {name} anyway")));
        }
    }
    let ends = machine.qmp.events_named(&["SHUTDOWN"]);
    match machine.qmp.execute("system_powerdown", json!({})) {
        Ok(_) | Err(QmpError::Closed) => {}
        Err(error) => return Err(Denied::Qemu(error.to_string())),
    }
    match ends.recv_deadline(Instant::now() + timeout) {
        // A closed connection means that QEMU has ended.
        Ok(_) | Err(crossbeam_channel::RecvTimeoutError::Disconnected) => Ok(StopEnd::ShutDown),
        Err(crossbeam_channel::RecvTimeoutError::Timeout) => Ok(StopEnd::PlugPulled),
    }
}
