//! How QEMU's migration ends: waited for, cancelled, or, where an agent that
//! crashed left one behind, cleaned up.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde_json::json;

use super::before::Before;
use super::progress::PROGRESS_WAIT;
use super::{Progress, Settings, Status, kept_listener};
use crate::machine::Machine;
use crate::mirror::{self, MirrorError};
use crate::qmp::{Event, Qmp, QmpError, RunState};

/// How long a cancelled migration may take to end.
pub(super) const CANCEL_WAIT: Duration = Duration::from_secs(10);
/// How long a cancelled migration gets before channels that no one has accepted are broken.
/// Otherwise, with its channels read, it ends in much less.
const UNREAD_WAIT: Duration = Duration::from_secs(1);
/// A set-up whose stream is read takes milliseconds, or seconds for RAM of terabytes; one that
/// takes longer won't end by itself.
pub(super) const SET_UP_MAX: Duration = Duration::from_secs(5);
/// Interval of queries: its end is an event, unless another thread takes that.
const SET_UP_ASK: Duration = Duration::from_millis(100);
/// Longest time until QEMU has cleaned up, on a busy host too: it takes one iteration of its main
/// loop.
const LET_GO_MAX: Duration = Duration::from_secs(20);
/// Interval of queries whether QEMU has cleaned up.
const LET_GO_ASK: Duration = Duration::from_millis(5);

/// Ends what an agent that crashed in the middle of a migration of this VM left
/// in its QEMU, including mirrors of its disks, and restores QEMU's settings. Returns
/// whether there was anything.
///
/// A VM that QEMU stopped for that migration runs again, unless QEMU had sent
/// it completely: then it stays stopped, since it may run elsewhere.
///
/// # Errors
/// If QEMU does not end the migration, or does not answer. The settings to restore
/// stay saved.
pub fn make_up(machine: &Machine) -> Result<bool, QmpError> {
    Leftovers::end(machine)?.clear(machine)
}

/// Resumes a VM that an earlier run of the agent was moving: ends what is left of the
/// move, and runs the VM if `run`, unless its guest has powered off. It may be called
/// repeatedly.
///
/// A VM whose migration has ended can run whatever else is left. So that is no error: it is
/// returned, `None` if nothing is left.
///
/// # Errors
/// If QEMU does not end the migration, does not answer, or does not let the VM run.
pub fn resume(machine: &Machine, run: bool) -> Result<Option<QmpError>, QmpError> {
    let leftovers = Leftovers::end(machine)?;
    // Queried even for a VM that stays paused: a QEMU that has exited keeps no VM.
    let state = machine.qmp.run_state()?;
    if run && !matches!(state, RunState::Running | RunState::Shutdown) {
        machine.qmp.cont()?;
        // Switches may have learned that the VM left.
        announce(machine);
    }
    Ok(leftovers.clear(machine).err())
}

/// What a crashed agent left in a QEMU whose migration has ended.
struct Leftovers {
    /// Whether there were mirrors of disks, or why some of them are still there.
    mirrors: Result<bool, MirrorError>,
    /// The settings to restore, `None` if there was no migration, or why they can't be read.
    settings: Result<Option<Before>, QmpError>,
}

impl Leftovers {
    /// Ends the mirrors if possible, and a migration whose settings are saved.
    ///
    /// # Errors
    /// If QEMU does not end the migration, or does not answer.
    fn end(machine: &Machine) -> Result<Self, QmpError> {
        let qmp = &machine.qmp;
        // Before its migration: a QEMU that waits for a mirror can't cancel a migration.
        // And even if nothing is saved: mirrors are found by their names, and may be all
        // that an agent could not remove.
        let mirrors = mirror::remove_left(qmp);
        let settings = Before::read(&machine.dir);
        // Settings that can't be read were saved for a migration too.
        if !matches!(settings, Ok(None)) {
            end_migration(qmp)?;
            // Not before: connections in its backlog break.
            kept_listener::close(qmp);
        }
        Ok(Self { mirrors, settings })
    }

    /// Restores the settings. Returns whether anything had been left.
    ///
    /// # Errors
    /// If QEMU refuses settings, or mirrors are still there.
    fn clear(self, machine: &Machine) -> Result<bool, QmpError> {
        let settings = self.settings?;
        if let Some(before) = &settings {
            before.put_back(&machine.qmp, &machine.dir)?;
        }
        match self.mirrors {
            Ok(mirrored) => Ok(mirrored || settings.is_some()),
            Err(MirrorError::Qmp(error)) => Err(error),
            Err(error) => Err(QmpError::Migration(error.to_string())),
        }
    }
}

/// Ends QEMU's migration, if it has not ended.
fn end_migration(qmp: &Qmp) -> Result<(), QmpError> {
    let events = qmp.events_named(&["MIGRATION"]);
    match Progress::query(qmp, PROGRESS_WAIT) {
        Ok(progress) if !progress.status.is_going_on() => Ok(()),
        // A QEMU that does not answer now may cancel later.
        Ok(_) | Err(QmpError::Timeout { .. }) => cancel(qmp, &events).map(drop),
        Err(error) => Err(error),
    }
}

/// Announces the VM to the network's switches, as QEMU does after a migration.
pub fn announce(machine: &Machine) {
    match Settings::of(&machine.qmp) {
        Ok(settings) => settings.announce(&machine.qmp),
        Err(error) => tracing::warn!(%error, "the VM can't announce itself to its network"),
    }
}

/// Cancels the migration, if it has not ended, and returns how it ended: it may have
/// completed just before.
///
/// A QEMU that does not answer now, because its storage hangs or it is blocked in a write
/// to a socket, cancels later: the tap reads all that it writes until then. It must not
/// be yanked: if one multifd channel breaks while QEMU 10.0 waits for another channel's
/// end of a pass, that channel's thread ends silently, and QEMU waits for ever,
/// with its big lock held.
///
/// # Errors
/// If QEMU has exited, or has not ended it after a while; a timeout, if QEMU does not report
/// whether it has.
pub(super) fn cancel(qmp: &Qmp, events: &Receiver<Event>) -> Result<Status, QmpError> {
    // A second `migrate_cancel` doesn't end it sooner.
    if wait_set_up(qmp, events, PROGRESS_WAIT)? != Some(Status::Cancelling) {
        match qmp.execute_within("migrate_cancel", json!({}), PROGRESS_WAIT) {
            Ok(_) | Err(QmpError::Timeout { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    // A QEMU that was busy cancels only once it answers. What follows must not come in the same
    // turn of its main loop.
    Progress::query(qmp, CANCEL_WAIT)?;
    match wait_end(qmp, events, UNREAD_WAIT) {
        Err(QmpError::Migration(_) | QmpError::Timeout { .. }) => {}
        ended => return ended,
    }
    // Channels that wait in the backlog of a socket that only QEMU has open are read by no one, and
    // QEMU breaks only its main channel by itself. By now all of them are blocked in writes, or
    // idle: none is on its way to wait for another.
    kept_listener::close(qmp);
    wait_end(qmp, events, CANCEL_WAIT)
}

/// Waits until the migration has passed its set-up, or has ended, and returns its status;
/// `None` if QEMU does not answer within `answer_max`. A QEMU 10.0 whose migration is cancelled
/// while its multifd channels connect can crash, and its VM with it: an assertion in
/// `yank_unregister_instance`, or a segmentation fault.
pub(super) fn wait_set_up(
    qmp: &Qmp,
    events: &Receiver<Event>,
    answer_max: Duration,
) -> Result<Option<Status>, QmpError> {
    let deadline = Instant::now() + SET_UP_MAX;
    loop {
        match Progress::query(qmp, answer_max) {
            Ok(Progress { status: Status::Setup, .. }) => {}
            Ok(progress) => return Ok(Some(progress.status)),
            // A QEMU that holds its lock for long has connected its channels, or hangs.
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

/// Waits until QEMU has cleaned up a migration that has ended. It reports `failed`
/// before its main loop has cleaned up; a migration that was started then was once
/// refused as a "duplicate yank instance", and QEMU 7.2 stayed in its set-up.
pub(super) fn wait_let_go(qmp: &Qmp) -> Result<(), QmpError> {
    let deadline = Instant::now() + LET_GO_MAX;
    loop {
        let held = qmp.execute("query-yank", json!({}))?;
        let is_migration = |instance: &serde_json::Value| instance["type"] == "migration";
        if !held.as_array().is_some_and(|held| held.iter().any(is_migration)) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let why = "QEMU has not released the previous migration; try again";
            return Err(QmpError::Migration(why.to_owned()));
        }
        // There is no event for it.
        std::thread::sleep(LET_GO_ASK);
    }
}

/// Blocks until the migration has ended, and returns how.
///
/// # Errors
/// If QEMU has exited, or reports after `timeout` that it continues. A timeout, if QEMU does not
/// answer: then the outcome is unknown, and another request would not help.
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
        // Query first: the event may have been sent before `events` was created.
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
        // An event means that there is something to query; one that another thread
        // took costs a second.
        let _ = events.recv_timeout(left.min(PROGRESS_WAIT));
    }
}

/// Checks that a QEMU whose migration has completed has given the VM up.
pub(super) fn check_given_up(state: &RunState) -> Result<(), QmpError> {
    match state {
        RunState::PostMigrate => Ok(()),
        state => Err(QmpError::Migration(format!(
            "it reports that all was sent, and yet the VM is {state}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use std::sync::{Arc, OnceLock};
    use std::thread;

    use super::*;
    use crate::qmp::played::{Played, played};

    /// A QEMU whose migration goes through these states, one per query, and stays in the
    /// last. Counts how often it is ordered to cancel.
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

    /// QEMU waits for channels that it alone has open, and hangs if they break as it cancels. It
    /// may be too busy to answer at first.
    #[test]
    fn a_migration_whose_channels_no_one_reads_ends_once_they_are_closed() {
        for busy in [Duration::ZERO, PROGRESS_WAIT * 5 / 2] {
            let (is_closed, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
            let cancelled_at = OnceLock::new();
            let (_dir, qmp, player) = played(move |command| {
                let answer = match command["execute"].as_str() {
                    Some("query-migrate") => {
                        let status = match (asked.fetch_add(1, SeqCst), is_closed.load(SeqCst)) {
                            (0, _) => "active",
                            (_, false) => "cancelling",
                            (_, true) => "cancelled",
                        };
                        json!({ "status": status })
                    }
                    Some("migrate_cancel") => {
                        thread::sleep(busy);
                        cancelled_at.set(Instant::now()).unwrap();
                        json!({})
                    }
                    Some("closefd") => {
                        let ready = |at: &Instant| at.elapsed() >= UNREAD_WAIT;
                        is_closed.store(cancelled_at.get().is_some_and(ready), SeqCst);
                        json!({})
                    }
                    _ => json!({}),
                };
                Some(format!("{}\n", json!({ "return": answer, "id": command["id"] })))
            });
            let qmp = qmp.unwrap();
            let events = qmp.events_named(&["MIGRATION"]);
            assert_eq!(cancel(&qmp, &events).unwrap(), Status::Cancelled, "{busy:?}");
            drop(qmp);
            player.join().unwrap();
        }
    }

    #[test]
    fn a_migration_that_goes_on_and_a_silent_qemu_are_different_errors() {
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
