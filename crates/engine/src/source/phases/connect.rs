//! The first phase: buffers, and a control connection to the destination.

use qemu::qmp::Event;
use serde_json::json;
use std::time::Duration;
use wire::ToDestination;

use super::Failed;
use crate::error::MigrationError;
use crate::resources::Pools;
use crate::source::connection::Control;
use crate::source::context::Context;

/// A QEMU that is not finishing answers in a millisecond or two.
const STATUS_MAX: Duration = Duration::from_millis(200);
/// States of a VM that stands still and is not about to leave.
const PAUSED: [&str; 6] =
    ["paused", "io-error", "guest-panicked", "watchdog", "internal-error", "debug"];

/// The destination's agent listens.
pub(crate) struct Connected<'m> {
    pub(crate) context: Context<'m>,
    pub(crate) pools: Pools,
    pub(crate) control: Control,
}

impl<'m> Context<'m> {
    pub(crate) fn connect(self) -> Result<Connected<'m>, Failed<'m>> {
        match self.open_connection() {
            Ok((pools, control)) => Ok(Connected { context: self, pools, control }),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    fn open_connection(&self) -> Result<(Pools, Control), MigrationError> {
        let pools = self.local.resources.leaving(self.request.disks.is_some())?;
        Ok((pools, Control::connect(self.local, self.peer)?))
    }
}

impl Connected<'_> {
    /// See [`Control::send`].
    pub(crate) fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.control.send(message)
    }

    /// Follows what QEMU says of the VM in any phase. True: it has stopped it for its
    /// switchover.
    pub(crate) fn follow(&mut self, event: &Event) -> Result<bool, MigrationError> {
        match event.name.as_str() {
            "STOP" if self.owner_paused() => self.context.was_running = false,
            "STOP" => return Ok(true),
            "RESUME" => {
                self.context.was_running = true;
                self.context.blackout.is_over();
            }
            "MIGRATION" if event.data["status"] == "failed" => {
                let why = "it says only that the migration failed".to_owned();
                return Err(MigrationError::Qemu(why));
            }
            "SHUTDOWN" => {
                let reason = event.data["reason"].as_str().unwrap_or("unknown reason");
                return Err(MigrationError::VmGone(format!("it shut down ({reason})")));
            }
            _ => {}
        }
        Ok(false)
    }

    /// Whether a stop is its owner's, or QEMU's for another cause than to finish, such as a
    /// disk that is full: then the VM is paused wherever it is. QEMU's own to finish shows as
    /// `finish-migrate`, or QEMU is too busy finishing to answer.
    fn owner_paused(&self) -> bool {
        let qmp = &self.context.vm.machine.qmp;
        let status = qmp.execute_within("query-status", json!({}), STATUS_MAX);
        let status = status.ok().and_then(|status| Some(status["status"].as_str()?.to_owned()));
        status.is_some_and(|status| PAUSED.contains(&status.as_str()))
    }
}
