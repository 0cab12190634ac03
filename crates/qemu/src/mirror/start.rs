//! Starts the mirrors of a VM's disks.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use super::job::Job;
use super::{MirrorError, undo};
use crate::disks::Disk;
use crate::qmp::{Qmp, QmpError, list};

/// Most bytes of one disk that are mirrored and not yet acknowledged. With QEMU's
/// 16 MiB a target that answers after 50 ms gets 273 MiB/s, with this 776.
const BUFFER_BYTES: u64 = 64 << 20;
/// The least that a write of the guest makes dirty. With QEMU's 64 KiB, scattered
/// writes of 4 KiB make the mirror copy sixteen times as much as the guest writes. A
/// bit for each must still be little memory.
const GRANULARITY_MIN: u64 = 4 << 10;
const GRANULARITY_MAX: u64 = 64 << 10;
const BITS_MAX: u64 = 64 << 20;
/// For connecting to the export, which QEMU does in its main loop.
const CONNECT: Duration = Duration::from_secs(10);

/// A disk and where it is mirrored to.
#[derive(Clone, Debug)]
pub struct Target {
    /// The disk, as [`crate::disks::disks`] lists it.
    pub disk: Disk,
    /// The unix socket of an NBD server.
    pub socket: PathBuf,
    /// The export's name there.
    pub export: String,
}

/// Connects to all targets, and starts the mirrors if all have the right sizes.
pub(super) fn start(qmp: &Qmp, jobs: &[Job], targets: &[Target]) -> Result<(), MirrorError> {
    for (job, target) in jobs.iter().zip(targets) {
        connect(qmp, job, target)?;
    }
    compare_sizes(qmp, jobs)?;
    for job in jobs {
        mirror(qmp, job)?;
        // To start the next disk's mirror, QEMU 10 waits until all requests in
        // flight are answered, and the guest waits with it: a paused job has few.
        tell(qmp, job, "block-job-pause")?;
    }
    jobs.iter().try_for_each(|job| tell(qmp, job, "block-job-resume"))
}

fn connect(qmp: &Qmp, job: &Job, target: &Target) -> Result<(), MirrorError> {
    let node = json!({
        "driver": "nbd",
        "node-name": job.id,
        "server": { "type": "unix", "path": target.socket },
        "export": target.export,
        // Without it holes are sent as zeros that must be allocated.
        "discard": "unmap",
        // Zeros that are allocated here need not be there. Other data is told
        // by its first bytes, so that the check costs nothing.
        "detect-zeroes": "unmap",
    });
    let added = qmp.execute_within("blockdev-add", node, CONNECT);
    if let Err(QmpError::Timeout { .. }) = added {
        undo::yank(qmp);
    }
    added.map(drop).map_err(|error| job.refused(error))
}

fn compare_sizes(qmp: &Qmp, jobs: &[Job]) -> Result<(), MirrorError> {
    let answer = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let sizes = list(&answer, "query-named-block-nodes", |one| {
        let name = one["node-name"].as_str()?.to_owned();
        Some((name, one["image"]["virtual-size"].as_u64().unwrap_or(0)))
    })?;
    for job in jobs {
        let size = sizes.iter().find(|(name, _)| *name == job.id).map_or(0, |(_, size)| *size);
        if size != job.bytes {
            return Err(MirrorError::Size { disk: job.disk.clone(), here: job.bytes, there: size });
        }
    }
    Ok(())
}

fn granularity(disk_bytes: u64) -> u64 {
    let least = (disk_bytes / BITS_MAX).next_power_of_two();
    least.clamp(GRANULARITY_MIN, GRANULARITY_MAX)
}

fn mirror(qmp: &Qmp, job: &Job) -> Result<(), MirrorError> {
    let mirror = json!({
        "job-id": job.id,
        "device": job.node,
        "target": job.id,
        "sync": "full",
        // Write-blocking from the start would starve the guest behind the copy.
        "copy-mode": "background",
        "on-source-error": "report",
        "on-target-error": "report",
        "buf-size": BUFFER_BYTES,
        "granularity": granularity(job.bytes),
    });
    qmp.execute("blockdev-mirror", mirror).map(drop).map_err(|error| job.refused(error))
}

fn tell(qmp: &Qmp, job: &Job, command: &str) -> Result<(), MirrorError> {
    match qmp.execute(command, json!({ "device": job.id })) {
        // The job has ended already: the events say why.
        Ok(_) | Err(QmpError::Refused { .. }) => Ok(()),
        Err(error) => Err(job.refused(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_disks_are_tracked_more_coarsely() {
        assert_eq!(granularity(512), 4 << 10);
        assert_eq!(granularity(256 << 30), 4 << 10);
        assert_eq!(granularity(1 << 40), 16 << 10);
        assert_eq!(granularity(1 << 60), 64 << 10);
    }
}
