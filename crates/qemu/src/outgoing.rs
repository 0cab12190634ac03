//! The source's side of QEMU's migration: settings, start, progress, end.
//!
//! QEMU keeps capabilities and parameters from one migration to the next, and
//! owners set them for reasons of their own. So all are saved before a migration,
//! set explicitly for it, and restored after it.

mod acknowledgement;
mod before;
mod blockers;
mod ending;
mod kept_listener;
mod movable;
mod progress;
mod settings;
mod shared_files;
mod state_after;
mod stream_kind;
mod wanted;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use serde_json::json;

use crate::machine::Machine;
use crate::qmp::{Event, Qmp, QmpError, RunState};
use crate::shape;
use before::Before;
use ending::CANCEL_WAIT;
use progress::PROGRESS_WAIT;
pub(crate) use settings::Settings;
pub(crate) use shared_files::Ram;
use state_after::state_after;
use wanted::{BANDWIDTH_HELD_BACK, BANDWIDTH_MAX, DOWNTIME_HELD_MS, DOWNTIME_MAX_MS};

pub use acknowledgement::Hold;
pub use before::forget_settings;
pub use blockers::{blockers, check_blockers};
pub use ending::{announce, make_up, resume};
pub use kept_listener::wait_set_up;
pub use movable::runs;
pub use progress::{Progress, Status};
pub use stream_kind::{StreamKind, choose_stream};

/// Whether a migration of this VM can be held.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn hold(machine: &Machine) -> Result<Hold, QmpError> {
    let kind = StreamKind::classic(&shape::of(&machine.qmp)?.devices);
    acknowledgement::of(machine, &Settings::of(&machine.qmp)?, kind)
}

/// Whether this event starts a pass over RAM after the first.
#[must_use]
pub fn ends_first_pass(event: &Event) -> bool {
    event.name == "MIGRATION_PASS" && event.data["pass"].as_u64() >= Some(2)
}

/// QEMU's migration from this host.
#[derive(Debug)]
pub struct Outgoing {
    qmp: Arc<Qmp>,
    uri: String,
    settings: Mutex<Settings>,
    events: Receiver<Event>,
    takes_bandwidth: bool,
    hold: Hold,
    /// QEMU has accepted the command.
    begun: AtomicBool,
    /// QEMU may have the socket open to which it connects.
    keeps_listener: AtomicBool,
}

impl Outgoing {
    /// Sets QEMU up to stream into the unix socket `socket`, and saves its previous
    /// settings.
    ///
    /// # Errors
    /// If something in the VM blocks migration, if a migration is in progress, or if
    /// QEMU refuses a setting. Nothing has changed then.
    pub fn new(machine: &Machine, kind: StreamKind, socket: &Path) -> Result<Self, QmpError> {
        Self::prepare(machine, kind, socket, (false, Ram::Sent))
    }

    /// As [`Outgoing::new`], for a VM whose disks move, too: with the VM stopped,
    /// QEMU waits for [`Outgoing::continue_switchover`] before it writes the
    /// rest, so that the disks can be drained while nothing changes them any more.
    ///
    /// # Errors
    /// As [`Outgoing::new`].
    pub fn pausing(machine: &Machine, kind: StreamKind, socket: &Path) -> Result<Self, QmpError> {
        Self::prepare(machine, kind, socket, (true, Ram::Sent))
    }

    /// As [`Outgoing::new`], for a VM that gets another QEMU on this host: RAM in shared files is
    /// left out, because the other QEMU has mapped them. That one must load nothing before this one
    /// has completed its migration.
    ///
    /// # Errors
    /// As [`Outgoing::new`].
    pub fn handing_over(machine: &Machine, socket: &Path) -> Result<Self, QmpError> {
        // The block list differs, so only a stream that is passed through unchanged is understood.
        Self::prepare(machine, StreamKind::Whole, socket, (false, Ram::HandedOver))
    }

    fn prepare(
        machine: &Machine,
        kind: StreamKind,
        socket: &Path,
        (pauses, ram): (bool, Ram),
    ) -> Result<Self, QmpError> {
        let qmp = Arc::clone(&machine.qmp);
        let now = Progress::query(&qmp, PROGRESS_WAIT)?;
        if now.status.is_going_on() {
            return Err(QmpError::Migration(format!(
                "another migration of this VM is {}; wait for it or `migrate_cancel` it. If that \
                 does not end it (QEMU can hang in a migration whose reader was killed), the VM \
                 runs on but moves only after a restart of its QEMU",
                now.status
            )));
        }
        check_blockers(&qmp)?;
        let events = qmp.events_named(&["MIGRATION", "STOP", "RESUME"]);
        if let Some(before) = Before::read(&machine.dir)? {
            // Of a migration whose end no agent has seen.
            kept_listener::close(&qmp);
            before.put_back(&qmp, &machine.dir)?;
        }
        let mut settings = Settings::of(&qmp)?;
        let takes_bandwidth = settings.has_parameter("avail-switchover-bandwidth");
        ram.check(&settings)?;
        let hold = acknowledgement::of(machine, &settings, kind)?;
        let outcome = wanted::set_up(machine, &mut settings, kind, (pauses, ram), hold);
        let uri = format!("unix:{}", socket.display());
        let settings = Mutex::new(settings);
        let outgoing = Self {
            qmp,
            uri,
            settings,
            events,
            takes_bandwidth,
            hold,
            begun: AtomicBool::new(false),
            keeps_listener: AtomicBool::new(false),
        };
        // On an error, dropping `outgoing` restores what was already changed.
        outcome.map(|()| outgoing)
    }

    /// Starts it: QEMU connects to the socket.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn start(&self) -> Result<(), QmpError> {
        ending::wait_let_go(&self.qmp)?;
        self.qmp.execute("migrate", json!({ "uri": self.uri }))?;
        self.begun.store(true, Relaxed);
        Ok(())
    }

    /// Whether QEMU (8.2 and newer) accepts a rate for its estimate of the downtime,
    /// rather than measure how fast the agent's socket takes bytes.
    #[must_use]
    pub fn takes_bandwidth(&self) -> bool {
        self.takes_bandwidth
    }

    /// Whether QEMU keeps a running VM running, however little is left, until it receives
    /// SWITCHOVER_ACK on its main channel, and does not end its migration before it
    /// receives SHUT. Otherwise only [`Outgoing::allow`] holds it.
    #[must_use]
    pub fn hold(&self) -> Hold {
        self.hold
    }

    /// Whether QEMU is held by a missing acknowledgement.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.hold == Hold::Awaited
    }

    /// Lets QEMU stop the VM once what is left would take `downtime_ms` at
    /// `bytes_per_s`. A QEMU that doesn't accept a rate uses its own measurement.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn allow(&self, bytes_per_s: u64, downtime_ms: u64) -> Result<(), QmpError> {
        let mut parameters =
            json!({ "downtime-limit": downtime_ms.clamp(DOWNTIME_HELD_MS, DOWNTIME_MAX_MS) });
        if self.takes_bandwidth {
            parameters["avail-switchover-bandwidth"] = bytes_per_s.max(1).into();
        }
        self.qmp.execute_within("migrate-set-parameters", parameters, PROGRESS_WAIT).map(drop)
    }

    /// Has QEMU send next to nothing, or as fast as it can.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn hold_back(&self, held_back: bool) -> Result<(), QmpError> {
        let bytes_per_s = if held_back { BANDWIDTH_HELD_BACK } else { BANDWIDTH_MAX };
        let parameters = json!({ "max-bandwidth": bytes_per_s });
        self.qmp.execute_within("migrate-set-parameters", parameters, PROGRESS_WAIT).map(drop)
    }

    /// The progress of QEMU's migration.
    ///
    /// # Errors
    /// If QEMU doesn't answer, such as while it stops the VM.
    pub fn progress(&self) -> Result<Progress, QmpError> {
        // Until this one has started, QEMU reports the one before, with all its passes and nothing
        // left if it had completed.
        if !self.begun.load(Relaxed) {
            return Ok(Progress::default());
        }
        Progress::query(&self.qmp, PROGRESS_WAIT)
    }

    /// The events `MIGRATION`, `STOP` and `RESUME`.
    #[must_use]
    pub fn events(&self) -> &Receiver<Event> {
        &self.events
    }

    /// Events for the passes that start from now on: see [`ends_first_pass`].
    #[must_use]
    pub fn passes(&self) -> Receiver<Event> {
        self.qmp.events_named(&["MIGRATION_PASS"])
    }

    /// QEMU's error, if the migration failed.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.progress().ok()?.error
    }

    /// Makes QEMU write what is left, once the disks are drained.
    ///
    /// # Errors
    /// If it doesn't wait for that.
    pub fn continue_switchover(&self) -> Result<(), QmpError> {
        self.qmp.execute("migrate-continue", json!({ "state": "pre-switchover" })).map(drop)
    }

    /// Blocks until QEMU has given up the VM: `completed` and `postmigrate`.
    ///
    /// # Errors
    /// If it ended otherwise, or did not end within `timeout`.
    pub fn wait_completed(&self, timeout: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + timeout;
        match ending::wait_end(&self.qmp, &self.events, timeout)? {
            Status::Completed => {}
            status => return Err(self.ended(&status)),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        ending::check_given_up(&self.settled(left)?)
    }

    /// Checks that QEMU has not been ordered to run the VM since it gave it up.
    ///
    /// # Errors
    /// If it has, or doesn't answer within `timeout`.
    pub fn check_completed(&self, timeout: Duration) -> Result<(), QmpError> {
        ending::check_given_up(&self.qmp.run_state_within(timeout)?)
    }

    /// Whether QEMU has given up the VM by now. False as well if it doesn't answer.
    #[must_use]
    pub fn has_completed(&self) -> bool {
        let progress = Progress::query(&self.qmp, PROGRESS_WAIT);
        let has_completed = progress.is_ok_and(|now| now.status == Status::Completed);
        has_completed && self.check_completed(PROGRESS_WAIT).is_ok()
    }

    /// Ends the migration in any state, resumes the VM if it ran, restores the settings, and
    /// returns how the migration ended. The VM must never have run elsewhere. A VM that was
    /// stopped before QEMU would have stopped it to finish, or whose guest powered off, is
    /// left so.
    ///
    /// A paused VM that QEMU has given up stays in `postmigrate`, because `cont`, which would end
    /// that, runs it.
    ///
    /// The reader of the stream must have closed its sockets: a QEMU that is
    /// stopping the VM does not answer until its writes end.
    ///
    /// # Errors
    /// If QEMU has exited, or does not resume the VM.
    pub fn back_out(&self, was_running: bool) -> Result<Status, QmpError> {
        let status = self.cancel()?;
        tracing::debug!(?status, "backed out");
        if was_running && waits_for_cont(&self.settled(CANCEL_WAIT)?, &status) {
            self.qmp.cont()?;
            if status == Status::Completed {
                // Switches may have learned that the VM left.
                self.settings.lock().announce(&self.qmp);
            }
        }
        self.restore();
        Ok(status)
    }

    /// Whether QEMU has given the VM up (`postmigrate`), after its migration has ended. An older
    /// QEMU, such as 7.2, does so with a paused VM also if that was cancelled while it finished.
    #[must_use]
    pub fn has_given_up(&self) -> bool {
        self.settled(CANCEL_WAIT).is_ok_and(|state| state == RunState::PostMigrate)
    }

    /// Cancels the migration, if it has not ended, and returns how it ended: it may have
    /// completed just before.
    ///
    /// # Errors
    /// If QEMU has exited, or does not end it.
    pub fn cancel(&self) -> Result<Status, QmpError> {
        ending::cancel(&self.qmp, &self.events)
    }

    /// Restores all settings as far as possible.
    pub fn restore(&self) {
        // First: the note of the settings is what a later run of the agent goes by.
        self.close_listener();
        self.settings.lock().restore(&self.qmp);
    }

    fn settled(&self, timeout: Duration) -> Result<RunState, QmpError> {
        state_after(&self.qmp, &self.events, timeout)
    }

    fn ended(&self, status: &Status) -> QmpError {
        let why = self.error().map(|error| format!(": {error}")).unwrap_or_default();
        QmpError::Migration(format!("it ended {status}{why}"))
    }
}

/// Whether a VM that ran needs `cont` after its migration ended so. QEMU resumes it by itself
/// unless it had sent everything: a VM that is stopped otherwise was stopped before QEMU
/// would have stopped it.
fn waits_for_cont(state: &RunState, ended: &Status) -> bool {
    match state {
        RunState::Running | RunState::Shutdown => false,
        RunState::FinishMigrate => true,
        _ => *ended == Status::Completed,
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.restore();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_gets_cont_only_where_qemu_does_not_resume_it() {
        use RunState::{FinishMigrate, IoError, Paused, PostMigrate, Running, Shutdown};
        for (state, ended, is_told) in [
            (PostMigrate, Status::Completed, true),
            (FinishMigrate, Status::Cancelled, true),
            (Running, Status::Completed, false),
            (Running, Status::Cancelled, false),
            // Stopped before QEMU would have stopped them; the second is how 7.2 reports it.
            (Paused, Status::Cancelled, false),
            (PostMigrate, Status::Cancelled, false),
            (IoError, Status::Failed, false),
            // QEMU refuses `cont`.
            (Shutdown, Status::Completed, false),
        ] {
            assert_eq!(waits_for_cont(&state, &ended), is_told, "{state} {ended}");
        }
    }
}
