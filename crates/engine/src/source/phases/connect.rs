//! The first phase: buffers, the VM's description, and a control connection to the destination.

use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use qemu::qmp::Event;
use qemu::shape;
use serde_json::json;
use wire::ToDestination;

use super::Failed;
use super::description::{Description, Drives};
use crate::error::MigrationError;
use crate::resources::Pools;
use crate::source::blackout::Blackout;
use crate::source::connection::Control;
use crate::source::context::Context;

/// A QEMU that is not finishing answers in a millisecond or two, unless it is flushing the
/// VM's disks; then it is queried again.
const STATUS_MAX: Duration = Duration::from_millis(200);
/// The VM stands still meanwhile, and the commit waits for answers of the same QEMU.
const DRIVES_MAX: Duration = Duration::from_secs(5);
/// From the guest's shutdown to the end of its QEMU, which closes the connection.
const END_MAX: Duration = Duration::from_secs(5);
/// States of a stopped VM that is not in a switchover.
pub(crate) const PAUSED: [&str; 6] =
    ["paused", "io-error", "guest-panicked", "watchdog", "internal-error", "debug"];

/// The destination's agent is connected.
pub(crate) struct Connected<'m> {
    pub(crate) context: Context<'m>,
    pub(crate) pools: Pools,
    pub(crate) control: Control,
    pub(crate) drives: Drives,
}

impl<'m> Context<'m> {
    pub(crate) fn connect(mut self) -> Result<(Connected<'m>, Description), Failed<'m>> {
        match self.open_connection() {
            Ok((pools, (drives, description), control)) => {
                Ok((Connected { context: self, pools, control, drives }, description))
            }
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    fn open_connection(
        &mut self,
    ) -> Result<(Pools, (Drives, Description), Control), MigrationError> {
        let pools = self.local.resources.leaving(self.request.disks.is_some())?;
        let described = self.describe(&pools)?;
        Ok((pools, described, Control::connect(self.local, self.peer)?))
    }
}

impl Connected<'_> {
    /// See [`Control::send`].
    pub(crate) fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.control.send(message)
    }

    /// Fails if a drive has other files than at the destination. Nothing keeps a VM's owner from
    /// taking a snapshot while it moves: the VM would go on there from a file that lacks all that
    /// was written since. To be called when the VM stands still. QEMU only looks at images, whose
    /// storage may hang, if there are other nodes over them than before.
    pub(crate) fn check_drives(&self) -> Result<(), MigrationError> {
        let qmp = &self.context.vm.machine.qmp;
        if shape::node_names(qmp, DRIVES_MAX)? == self.drives.node_names {
            return Ok(());
        }
        let now = shape::drives_of(qmp, DRIVES_MAX)?;
        match shape::changed_files(&self.drives.staying, &now) {
            Some(how) => Err(MigrationError::Qemu(how)),
            None => Ok(()),
        }
    }

    /// Follows a QEMU event of the VM, in any phase. True: QEMU has stopped it for its
    /// switchover.
    pub(crate) fn follow(&mut self, event: &Event) -> Result<bool, MigrationError> {
        match event.name.as_str() {
            "STOP" => {
                // Before QEMU is queried for the reason.
                self.context.threads.hurry();
                return Ok(self.is_switchover());
            }
            "RESUME" => {
                self.context.was_running = true;
                self.context.stop_unclear = false;
                self.goes_on(Blackout::is_over);
            }
            "MIGRATION" if event.data["status"] == "failed" => {
                let why = "it reports only that the migration failed".to_owned();
                return Err(MigrationError::Qemu(why));
            }
            "SHUTDOWN" => return Err(self.shut_down(event)),
            _ => {}
        }
        Ok(false)
    }

    /// Queries QEMU again for the reason of the VM's stop, if that is unclear.
    pub(crate) fn ask_again(&mut self) {
        if self.context.stop_unclear && !self.is_switchover() {
            self.goes_on(Blackout::forget);
        }
    }

    /// Whether QEMU stopped the VM to finish. Otherwise its owner paused it, or QEMU stopped
    /// it for another cause such as a full disk: then the VM stays paused wherever it is.
    ///
    /// QEMU's own stop shows as `finish-migrate`, or QEMU is too busy finishing to answer. An
    /// owner's pause just before it looks the same: see [`stream::GlobalState`].
    fn is_switchover(&mut self) -> bool {
        let state = self.run_state();
        self.context.stop_unclear = state.is_none();
        match state.as_deref() {
            Some(state) if PAUSED.contains(&state) => {
                self.context.was_running = false;
                false
            }
            // Its owner resumed it at once, which the next event reports.
            Some("running" | "suspended") => false,
            _ => true,
        }
    }

    fn run_state(&self) -> Option<String> {
        let qmp = &self.context.vm.machine.qmp;
        let status = qmp.execute_within("query-status", json!({}), STATUS_MAX).ok()?;
        Some(status["status"].as_str()?.to_owned())
    }

    /// The guest has shut down.
    fn shut_down(&mut self, event: &Event) -> MigrationError {
        let reason = event.data["reason"].as_str().unwrap_or("unknown reason");
        if !self.is_kept() {
            return MigrationError::VmGone(format!("it shut down ({reason})"));
        }
        self.context.was_running = false;
        MigrationError::PoweredOff(match reason {
            "guest-panic" => "the guest's kernel crashed",
            "guest-reset" => "the guest rebooted, and QEMU has -no-reboot",
            _ => "the guest powered off",
        })
    }

    /// Whether QEMU keeps the VM of a guest that has shut down, as with `-no-shutdown`: it
    /// then stops the VM right after that event. A QEMU that is ending must not be queried:
    /// 10.0 can hang.
    fn is_kept(&self) -> bool {
        let until = Instant::now() + END_MAX;
        loop {
            match self.context.qemu_events.recv_deadline(until) {
                Ok(event) if event.name == "STOP" => return true,
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
                // The VM was stopped before.
                Err(RecvTimeoutError::Timeout) => return self.run_state().is_some(),
            }
        }
    }
}
