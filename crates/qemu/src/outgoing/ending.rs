//! How a migration of QEMU's ends: waited for, asked for, or, where an agent
//! that crashed left one behind, made up for.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde_json::json;

use super::before::Before;
use super::{CANCEL_WAIT, PROGRESS_WAIT, Progress, Settings, Status};
use crate::machine::Machine;
use crate::mirror::{self, MirrorError};
use crate::qmp::{Event, Qmp, QmpError, RunState};

/// A set-up that is read takes milliseconds; what takes longer won't end by
/// itself.
const SET_UP_MAX: Duration = Duration::from_secs(5);
/// Its end comes as an event, unless somebody else takes that.
const SET_UP_ASK: Duration = Duration::from_millis(100);
/// Between two looks whether QEMU has let go.
const LET_GO_ASK: Duration = Duration::from_millis(5);

/// Ends what an agent that crashed in the middle of a migration of this VM left
/// in its QEMU, mirrors of its disks too, and puts QEMU's settings back. Says
/// whether there was anything.
/// A VM that QEMU stopped for that migration runs again, unless QEMU had sent
/// it completely: then it stays stopped, since it may run elsewhere.
///
/// # Errors
/// If QEMU does not end the migration, or does not answer. What has to be put
/// back stays noted.
pub fn make_up(machine: &Machine) -> Result<bool, QmpError> {
    let qmp = &machine.qmp;
    // Before its migration: a QEMU that waits for a mirror can't cancel that.
    // And whatever is noted: mirrors carry their names, and may be all that
    // an agent could not remove.
    let mirrored = mirror::remove_left(qmp);
    let migrated = end_migration(machine)?;
    mirrored.map(|mirrored| mirrored || migrated).map_err(|error| match error {
        MirrorError::Qmp(error) => error,
        error => QmpError::Migration(error.to_string()),
    })
}

/// Says whether one was noted.
fn end_migration(machine: &Machine) -> Result<bool, QmpError> {
    let Some(before) = Before::read(&machine.dir)? else { return Ok(false) };
    let qmp = &machine.qmp;
    let events = qmp.events_named(&["MIGRATION"]);
    match Progress::query(qmp, PROGRESS_WAIT) {
        Ok(progress) if !progress.status.is_going_on() => {}
        // One that does not answer now may cancel later.
        Ok(_) | Err(QmpError::Timeout { .. }) => drop(cancel(qmp, &events)?),
        Err(error) => return Err(error),
    }
    before.put_back(qmp, &machine.dir)?;
    Ok(true)
}

/// Has a VM go on that an earlier run of the agent was moving: ends what is
/// left of that, and runs the VM if it ran. Doing it twice is the same as once.
///
/// # Errors
/// As [`make_up`]; or if QEMU does not let the VM run.
pub fn resume(machine: &Machine, run: bool) -> Result<(), QmpError> {
    make_up(machine)?;
    if run && machine.qmp.run_state()? != RunState::Running {
        machine.qmp.cont()?;
        // Switches may have learned that it left.
        announce(machine);
    }
    Ok(())
}

/// Tells switches where the VM is, as QEMU does after a migration.
pub fn announce(machine: &Machine) {
    let told = Settings::of(&machine.qmp).and_then(|settings| {
        let arguments = settings.announcement();
        if arguments["rounds"] == 0 {
            return Ok(());
        }
        machine.qmp.execute("announce-self", arguments).map(drop)
    });
    if let Err(error) = told {
        tracing::warn!(%error, "the VM can't announce itself to its network");
    }
}

/// Ends it, if it has not ended, and says how it came out: it may have
/// completed just before.
///
/// A QEMU that does not answer now, since its storage hangs or it writes to a
/// socket, cancels later: the tap reads all that it writes until then. It must not
/// be yanked: if one multifd channel breaks while QEMU 10.0 waits for another one's
/// end of a pass, that one's thread ends without a word, and QEMU waits for ever,
/// with its big lock held.
///
/// # Errors
/// If QEMU is gone, or has not ended it after a while.
pub(super) fn cancel(qmp: &Qmp, events: &Receiver<Event>) -> Result<Status, QmpError> {
    wait_set_up(qmp, events)?;
    match qmp.execute_within("migrate_cancel", json!({}), PROGRESS_WAIT) {
        Ok(_) | Err(QmpError::Timeout { .. }) => wait_end(qmp, events, CANCEL_WAIT),
        Err(error) => Err(error),
    }
}

/// Waits until QEMU is through with its set-up, or has ended. A QEMU 10.0 that
/// is cancelled while its multifd channels connect can crash, and its VM with
/// it: an assertion in `yank_unregister_instance`, or a segmentation fault.
fn wait_set_up(qmp: &Qmp, events: &Receiver<Event>) -> Result<(), QmpError> {
    let deadline = Instant::now() + SET_UP_MAX;
    loop {
        match Progress::query(qmp, PROGRESS_WAIT) {
            Ok(Progress { status: Status::Setup, .. }) => {}
            // One that holds its lock for long is past that, or hangs.
            Ok(_) | Err(QmpError::Timeout { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let _ = events.recv_timeout(left.min(SET_UP_ASK));
    }
}

/// Waits until QEMU has let go of a migration that has ended. `failed` shows
/// before its main loop has cleaned up; a migration that is begun then was once
/// refused as a "duplicate yank instance", and QEMU 7.2 stayed in its set-up.
pub(super) fn wait_let_go(qmp: &Qmp) -> Result<(), QmpError> {
    let deadline = Instant::now() + SET_UP_MAX;
    loop {
        let held = qmp.execute("query-yank", json!({}))?;
        let is_migration = |instance: &serde_json::Value| instance["type"] == "migration";
        if !held.as_array().is_some_and(|held| held.iter().any(is_migration)) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let why = "QEMU has not let go of the migration before; try again";
            return Err(QmpError::Migration(why.to_owned()));
        }
        // Nothing tells of it; it takes QEMU's main loop one round.
        std::thread::sleep(LET_GO_ASK);
    }
}

/// Blocks until it has ended, and says how.
pub(super) fn wait_end(
    qmp: &Qmp,
    events: &Receiver<Event>,
    timeout: Duration,
) -> Result<Status, QmpError> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Ask first: the event may have come before we listened.
        match Progress::query(qmp, left.max(PROGRESS_WAIT)) {
            Ok(progress) if !progress.status.is_going_on() => return Ok(progress.status),
            Ok(_) | Err(QmpError::Timeout { .. }) => {}
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            return Err(QmpError::Migration(format!(
                "it did not end within {} s",
                timeout.as_secs()
            )));
        }
        // An event tells that there is something to ask; one that was taken by
        // somebody else costs a second.
        let _ = events.recv_timeout(left.min(PROGRESS_WAIT));
    }
}
