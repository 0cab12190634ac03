//! One mirror, and its state as QEMU reports it.

use std::time::Duration;

use serde_json::Value;

use super::error::{MirrorError, Side};
use crate::disks::Disk;
use crate::qmp::QmpError;

/// How the names of everything created here start.
pub const PREFIX: &str = "droveway-mirror-";

pub(super) const ASK: Duration = Duration::from_secs(5);
/// How often to query, in case another thread took an event.
pub(super) const LOOK: Duration = Duration::from_secs(1);

pub(super) const EVENTS: [&str; 4] =
    ["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED", "BLOCK_JOB_ERROR"];

/// The state of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It copies what the disk held.
    Copying,
    /// All was copied once; it copies what the guest writes.
    Ready,
    /// It ended, with nothing left to copy.
    Drained,
    /// It failed.
    Failed(Side, String),
    /// Another program ended it, or how it ended isn't known.
    Ended,
}

/// One mirror.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// Its name in QEMU, and its target node's.
    pub(super) id: String,
    pub(super) disk: String,
    pub(super) node: String,
    pub(super) guest: String,
    pub(super) bytes: u64,
    pub(super) state: State,
    /// Whether it was asked to end when nothing is left.
    pub(super) finishing: bool,
    pub(super) write_blocking: bool,
    failing: Option<Side>,
}

impl Job {
    pub(super) fn new(nth: usize, disk: &Disk) -> Self {
        Self {
            // The disk's own name may be a path, which QEMU doesn't accept.
            id: format!("{PREFIX}{nth}"),
            disk: disk.name.clone(),
            node: disk.node.clone(),
            guest: disk.guest.clone(),
            bytes: disk.bytes,
            state: State::Copying,
            finishing: false,
            write_blocking: false,
            failing: None,
        }
    }

    /// The error if QEMU refuses a command for it.
    pub(super) fn refused(&self, source: QmpError) -> MirrorError {
        MirrorError::Qemu { disk: self.disk.clone(), source }
    }

    pub(super) fn handle(&mut self, event: &str, data: &Value) {
        match event {
            "BLOCK_JOB_ERROR" => {
                // Many requests fail at once; the first shows which end failed.
                self.failing.get_or_insert(match data["operation"].as_str() {
                    Some("read") => Side::Source,
                    _ => Side::Target,
                });
            }
            "BLOCK_JOB_READY" if self.state == State::Copying => self.state = State::Ready,
            // A job that lost its target ends with the same event as one that is
            // done, but with an error.
            "BLOCK_JOB_COMPLETED" => self.end(data["error"].as_str()),
            "BLOCK_JOB_CANCELLED" => self.state = State::Ended,
            _ => {}
        }
    }

    fn end(&mut self, error: Option<&str>) {
        self.state = match (error, self.failing) {
            (Some(reason), side) => State::Failed(side.unwrap_or(Side::Target), reason.to_owned()),
            (None, Some(side)) => State::Failed(side, "QEMU gives no reason".to_owned()),
            (None, None) if self.finishing => State::Drained,
            (None, None) => State::Ended,
        };
    }

    /// Processes QEMU's list of jobs: whether the job is ready, if it is listed.
    pub(super) fn seen(&mut self, ready: Option<bool>) {
        match (&self.state, ready) {
            (State::Copying, Some(true)) => self.state = State::Ready,
            // How it ended isn't known, so it never counts as done.
            (State::Copying | State::Ready, None) => self.state = State::Ended,
            _ => {}
        }
    }

    pub(super) fn check(&self) -> Result<(), MirrorError> {
        match &self.state {
            State::Copying | State::Ready | State::Drained => Ok(()),
            State::Failed(side, reason) => Err(MirrorError::Failed {
                disk: self.disk.clone(),
                side: *side,
                reason: reason.clone(),
            }),
            State::Ended => Err(MirrorError::Ended { disk: self.disk.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn after(events: &[(&str, Value)], finishing: bool) -> State {
        let mut job = Job::new(0, &Disk::default());
        job.finishing = finishing;
        for (name, data) in events {
            job.handle(name, data);
        }
        job.state
    }

    #[test]
    fn an_end_is_a_good_one_only_if_it_was_asked_for_and_nothing_failed() {
        let nothing = || json!({});
        let ready = || ("BLOCK_JOB_READY", nothing());
        let done = || ("BLOCK_JOB_COMPLETED", nothing());
        let failed = || ("BLOCK_JOB_COMPLETED", json!({"error": "Input/output error"}));
        let error = |operation: &str| ("BLOCK_JOB_ERROR", json!({ "operation": operation }));
        let reason = || "Input/output error".to_owned();
        type Row<'a> = (&'a [(&'a str, Value)], bool, State);
        let table: [Row<'_>; 9] = [
            (&[], false, State::Copying),
            (&[ready()], false, State::Ready),
            (&[ready(), done()], true, State::Drained),
            (&[ready(), done()], false, State::Ended),
            (&[ready(), failed()], true, State::Failed(Side::Target, reason())),
            (
                &[error("write"), error("read"), failed()],
                false,
                State::Failed(Side::Target, reason()),
            ),
            (&[error("read"), failed()], false, State::Failed(Side::Source, reason())),
            (&[ready(), ("BLOCK_JOB_CANCELLED", nothing())], true, State::Ended),
            (
                &[ready(), error("write"), done()],
                true,
                State::Failed(Side::Target, "QEMU gives no reason".to_owned()),
            ),
        ];
        for (events, finishing, expected) in table {
            assert_eq!(after(events, finishing), expected, "{events:?}");
        }
    }

    #[test]
    fn a_job_that_vanished_is_never_taken_for_done() {
        let mut job = Job::new(0, &Disk::default());
        job.seen(Some(false));
        assert_eq!(job.state, State::Copying);
        job.seen(Some(true));
        assert_eq!(job.state, State::Ready);
        job.finishing = true;
        job.seen(None);
        assert!(job.check().is_err());
    }
}
