//! The VM's state after a migration.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::progress::PROGRESS_WAIT;
use crate::qmp::{Event, Qmp, QmpError, RunState};

/// The VM's state after the migration's end. QEMU first reports how that ended, and sets the VM's
/// state (`postmigrate`, or running again) a moment later, without an event: it is waited for until
/// `timeout`.
pub(super) fn state_after(
    qmp: &Qmp,
    events: &Receiver<Event>,
    timeout: Duration,
) -> Result<RunState, QmpError> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let state = qmp.run_state_within(left.max(PROGRESS_WAIT))?;
        if state != RunState::FinishMigrate || left.is_zero() {
            return Ok(state);
        }
        // The VM is stopped meanwhile: query again soon.
        let _ = events.recv_timeout(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use serde_json::json;

    use super::*;
    use crate::qmp::played::played;

    #[test]
    fn a_state_that_changes_a_moment_later_is_waited_for() {
        let table = [
            (Duration::from_secs(10), RunState::PostMigrate),
            (Duration::ZERO, RunState::FinishMigrate),
        ];
        for (timeout, expected) in table {
            let asked = AtomicUsize::new(0);
            let (_dir, qmp, player) = played(move |command| {
                let is_first = asked.fetch_add(1, SeqCst) == 0;
                let status = if is_first { "finish-migrate" } else { "postmigrate" };
                let answer = json!({ "return": { "status": status }, "id": command["id"] });
                Some(format!("{answer}\n"))
            });
            let qmp = qmp.unwrap();
            let events = qmp.events_named(&["MIGRATION"]);
            assert_eq!(state_after(&qmp, &events, timeout).unwrap(), expected);
            drop(qmp);
            player.join().unwrap();
        }
    }
}
