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
/// left of that, and runs the VM if it ran, unless its guest has powered off. Doing it
/// twice is the same as once.
///
/// # Errors
/// As [`make_up`]; or if QEMU does not let the VM run.
pub fn resume(machine: &Machine, run: bool) -> Result<(), QmpError> {
    make_up(machine)?;
    if run && !matches!(machine.qmp.run_state()?, RunState::Running | RunState::Shutdown) {
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
/// If QEMU is gone, or has not ended it after a while; a timeout, if it does not say
/// whether it has.
pub(super) fn cancel(qmp: &Qmp, events: &Receiver<Event>) -> Result<Status, QmpError> {
    // Told twice it ends no sooner.
    if wait_set_up(qmp, events)? != Some(Status::Cancelling) {
        match qmp.execute_within("migrate_cancel", json!({}), PROGRESS_WAIT) {
            Ok(_) | Err(QmpError::Timeout { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    wait_end(qmp, events, CANCEL_WAIT)
}

/// Waits until QEMU is through with its set-up, or has ended, and says where it is;
/// none if it does not answer. A QEMU 10.0 that is cancelled while its multifd channels
/// connect can crash, and its VM with it: an assertion in `yank_unregister_instance`,
/// or a segmentation fault.
fn wait_set_up(qmp: &Qmp, events: &Receiver<Event>) -> Result<Option<Status>, QmpError> {
    let deadline = Instant::now() + SET_UP_MAX;
    loop {
        match Progress::query(qmp, PROGRESS_WAIT) {
            Ok(Progress { status: Status::Setup, .. }) => {}
            Ok(progress) => return Ok(Some(progress.status)),
            // One that holds its lock for long is past that, or hangs.
            Err(QmpError::Timeout { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Some(Status::Setup));
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
///
/// # Errors
/// If QEMU is gone, or says after `timeout` that it goes on. A timeout, if QEMU does not
/// say what it does: whoever waited can't tell then, and has nothing new to ask for.
pub(super) fn wait_end(
    qmp: &Qmp,
    events: &Receiver<Event>,
    timeout: Duration,
) -> Result<Status, QmpError> {
    let deadline = Instant::now() + timeout;
    let mut silent_since: Option<Instant> = None;
    loop {
        let asked = Instant::now();
        let left = deadline.saturating_duration_since(asked);
        // Ask first: the event may have come before we listened.
        match Progress::query(qmp, left.max(PROGRESS_WAIT)) {
            Ok(progress) if !progress.status.is_going_on() => return Ok(progress.status),
            Ok(_) => silent_since = None,
            Err(QmpError::Timeout { .. }) => silent_since = silent_since.or(Some(asked)),
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            let Some(since) = silent_since else {
                let waited_s = timeout.as_secs();
                return Err(QmpError::Migration(format!("it did not end within {waited_s} s")));
            };
            let waited = Duration::from_secs(since.elapsed().as_secs());
            return Err(QmpError::Timeout { command: "query-migrate".to_owned(), waited });
        }
        // An event tells that there is something to ask; one that was taken by
        // somebody else costs a second.
        let _ = events.recv_timeout(left.min(PROGRESS_WAIT));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;
    use crate::qmp::played::{Played, played};

    /// A QEMU whose migration is in these states, each until it is asked again, and in the
    /// last for good. Counts how often it is told to cancel.
    fn qemu(states: &'static [&'static str]) -> (Played, Arc<AtomicUsize>) {
        let (asked, cancels) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let cancelled = Arc::clone(&cancels);
        let played = played(move |command| {
            let said = match command["execute"].as_str() {
                Some("query-migrate") => {
                    let nth = asked.fetch_add(1, SeqCst).min(states.len() - 1);
                    json!({ "status": states[nth] })
                }
                Some("migrate_cancel") => {
                    cancelled.fetch_add(1, SeqCst);
                    json!({})
                }
                _ => return None,
            };
            Some(format!("{}\n", json!({ "return": said, "id": command["id"] })))
        });
        (played, cancels)
    }

    #[test]
    fn a_migration_is_told_to_cancel_once() {
        let table: [(&'static [&'static str], usize); 2] =
            [(&["active", "cancelled"], 1), (&["cancelling", "cancelled"], 0)];
        for (states, cancels) in table {
            let ((_dir, qmp, player), told) = qemu(states);
            let qmp = qmp.unwrap();
            let events = qmp.events_named(&["MIGRATION"]);
            assert_eq!(cancel(&qmp, &events).unwrap(), Status::Cancelled, "{states:?}");
            assert_eq!(told.load(SeqCst), cancels, "{states:?}");
            drop(qmp);
            player.join().unwrap();
        }
    }

    #[test]
    fn one_that_goes_on_did_not_end_and_of_one_that_is_silent_nobody_can_tell() {
        let ((_dir, qmp, player), _) = qemu(&["active"]);
        let qmp = qmp.unwrap();
        let events = qmp.events_named(&["MIGRATION"]);
        let error = wait_end(&qmp, &events, Duration::ZERO).unwrap_err();
        assert!(matches!(error, QmpError::Migration(_)), "{error}");
        drop(qmp);
        player.join().unwrap();

        let (_dir, qmp, player) = played(|_| Some(String::new()));
        let qmp = qmp.unwrap();
        let events = qmp.events_named(&["MIGRATION"]);
        let error = wait_end(&qmp, &events, Duration::ZERO).unwrap_err();
        assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
        drop(qmp);
        player.join().unwrap();
    }
}
