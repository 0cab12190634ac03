//! The first phase: buffers, and a control connection to the destination.

use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use qemu::qmp::Event;
use serde_json::json;
use wire::ToDestination;

use super::Failed;
use crate::error::MigrationError;
use crate::resources::Pools;
use crate::source::connection::Control;
use crate::source::context::Context;

/// A QEMU that is not finishing answers in a millisecond or two, unless it flushes the
/// VM's disks: then it is asked again.
const STATUS_MAX: Duration = Duration::from_millis(200);
/// From a guest's end to its QEMU's, with which the connection ends.
const END_MAX: Duration = Duration::from_secs(5);
/// States of a VM that stands still and is not about to leave.
pub(crate) const PAUSED: [&str; 6] =
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
            "STOP" => return Ok(self.is_switchover()),
            "RESUME" => {
                self.context.was_running = true;
                self.context.stop_unclear = false;
                self.context.blackout.is_over();
            }
            "MIGRATION" if event.data["status"] == "failed" => {
                let why = "it says only that the migration failed".to_owned();
                return Err(MigrationError::Qemu(why));
            }
            "SHUTDOWN" => return Err(self.shut_down(event)),
            _ => {}
        }
        Ok(false)
    }

    /// Asks QEMU again what it stopped the VM for, if it has not said.
    pub(crate) fn ask_again(&mut self) {
        if self.context.stop_unclear && !self.is_switchover() {
            self.context.blackout.forget();
        }
    }

    /// Whether QEMU stopped the VM to finish. Otherwise its owner paused it, or QEMU stopped
    /// it for another cause, such as a disk that is full: then the VM is paused wherever it
    /// is.
    ///
    /// QEMU's own stop shows as `finish-migrate`, or QEMU is too busy finishing to answer. So
    /// does an owner's just before it: see [`stream::GlobalState`].
    fn is_switchover(&mut self) -> bool {
        let state = self.run_state();
        self.context.stop_unclear = state.is_none();
        match state.as_deref() {
            Some(state) if PAUSED.contains(&state) => {
                self.context.was_running = false;
                false
            }
            // Its owner let it run again at once, which is told next.
            Some("running" | "suspended") => false,
            _ => true,
        }
    }

    fn run_state(&self) -> Option<String> {
        let qmp = &self.context.vm.machine.qmp;
        let status = qmp.execute_within("query-status", json!({}), STATUS_MAX).ok()?;
        Some(status["status"].as_str()?.to_owned())
    }

    /// The guest has ended.
    fn shut_down(&mut self, event: &Event) -> MigrationError {
        let reason = event.data["reason"].as_str().unwrap_or("unknown reason");
        if !self.is_kept() {
            return MigrationError::VmGone(format!("it shut down ({reason})"));
        }
        self.context.was_running = false;
        MigrationError::PoweredOff(match reason {
            "guest-panic" => "the guest's kernel crashed",
            "guest-reset" => "the guest rebooted, and QEMU was told not to",
            _ => "the guest powered off",
        })
    }

    /// Whether QEMU keeps the VM of a guest that has ended, as with `-no-shutdown`: then it
    /// stops it, right behind that word. One that ends is better not asked: 10.0 can hang.
    fn is_kept(&self) -> bool {
        let until = Instant::now() + END_MAX;
        loop {
            match self.context.qemu_events.recv_deadline(until) {
                Ok(event) if event.name == "STOP" => return true,
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
                // The VM stood still before.
                Err(RecvTimeoutError::Timeout) => return self.run_state().is_some(),
            }
        }
    }
}
