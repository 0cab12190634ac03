//! Removes everything that mirrors disks from a QEMU, in any state.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde_json::{Value, json};

use super::job::{ASK, EVENTS, LOOK, PREFIX};
use super::{MirrorError, throttle};
use crate::qmp::{Event, Qmp, QmpError, list};

/// How long jobs may take to end before their connections are cut.
const CANCEL_WAIT: Duration = Duration::from_secs(5);
/// How long they may take after that.
const YANKED_WAIT: Duration = Duration::from_secs(10);

/// Removes what mirrors disks, of this agent or of one that crashed: jobs,
/// their targets, throttles. The VM and its disks are as they were. Returns whether
/// there was anything.
///
/// A target that doesn't answer keeps QEMU from ending the job, and from
/// answering some commands: then its connection is cut by an out-of-band command.
/// That frees a QEMU that waits for replies; one that is blocked in a write to a unix
/// socket notices only when the other end is closed.
///
/// # Errors
/// If QEMU has exited or something stays behind.
pub fn remove_left(qmp: &Qmp) -> Result<bool, MirrorError> {
    let events = qmp.events_named(&EVENTS);
    let jobs_left = match cancel(qmp) {
        Err(QmpError::Timeout { .. }) => {
            yank(qmp);
            cancel(qmp)?
        }
        other => other?,
    };
    if !wait_removed(qmp, &events, CANCEL_WAIT)? {
        yank(qmp);
        if !wait_removed(qmp, &events, YANKED_WAIT)? {
            let left = jobs(qmp)?.join(", ");
            return Err(MirrorError::Left(format!("the jobs {left} don't end")));
        }
    }
    let lifted = throttle::lift(qmp)?;
    let targets = nodes(qmp)?;
    if targets.is_empty() {
        return Ok(jobs_left || lifted);
    }
    targets.iter().for_each(|node| remove_node(qmp, node));
    let left = nodes(qmp)?;
    if left.is_empty() {
        return Ok(true);
    }
    Err(MirrorError::Left(format!("the nodes {}", left.join(", "))))
}

/// Removes a target that no job uses any more.
pub(super) fn remove_node(qmp: &Qmp, node: &str) {
    if let Err(error) = qmp.execute_within("blockdev-del", json!({ "node-name": node }), ASK) {
        tracing::warn!(node, %error, "the target of a mirror can't be removed now");
    }
}

/// Cuts the connections to all targets, even while QEMU's main loop waits for
/// one of them.
pub(super) fn yank(qmp: &Qmp) {
    let Ok(answer) = qmp.execute_oob("query-yank", json!({})) else { return };
    let all = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let ours = |one: &&Value| one["node-name"].as_str().is_some_and(|n| n.starts_with(PREFIX));
    let instances: Vec<Value> = all.iter().filter(ours).cloned().collect();
    if instances.is_empty() {
        return;
    }
    tracing::warn!(count = instances.len(), "a mirror's target doesn't answer: cutting it off");
    if let Err(error) = qmp.execute_oob("yank", json!({ "instances": instances })) {
        tracing::warn!(%error, "the connections to mirrors' targets can't be cut");
    }
}

/// Cancels all jobs. Returns whether there was one.
fn cancel(qmp: &Qmp) -> Result<bool, QmpError> {
    let jobs = jobs(qmp)?;
    for job in &jobs {
        let force = json!({ "device": job, "force": true });
        match qmp.execute_within("block-job-cancel", force, ASK) {
            // The job may have ended meanwhile.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(!jobs.is_empty())
}

fn wait_removed(qmp: &Qmp, events: &Receiver<Event>, timeout: Duration) -> Result<bool, QmpError> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match jobs(qmp) {
            Ok(jobs) if jobs.is_empty() => return Ok(true),
            Ok(_) | Err(QmpError::Timeout { .. }) => {}
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            return Ok(false);
        }
        // The end of a job is an event.
        let _ = events.recv_timeout(left.min(LOOK));
    }
}

fn jobs(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    named(qmp, "query-block-jobs", json!({}), "device")
}

fn nodes(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    named(qmp, "query-named-block-nodes", json!({ "flat": true }), "node-name")
}

fn named(qmp: &Qmp, command: &str, arguments: Value, key: &str) -> Result<Vec<String>, QmpError> {
    let answer = qmp.execute_within(command, arguments, ASK)?;
    let names = list(&answer, command, |one| Some(one[key].as_str()?.to_owned()))?;
    Ok(names.into_iter().filter(|name| name.starts_with(PREFIX)).collect())
}
