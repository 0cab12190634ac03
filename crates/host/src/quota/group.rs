//! The group of throttled threads.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::quota::error::{At, QuotaError};
use crate::quota::hierarchy::{Controller, Version, mount};
use crate::quota::period::Quota;

/// Prefix of our groups' names, followed by the PID.
const PREFIX: &str = "droveway-slow-";
/// With version 2, the controllers that a group enables for the groups below it.
const SUBTREE: &str = "cgroup.subtree_control";
/// A thread that leaves a group stays listed there for a moment.
const REMOVE_TRIES: u32 = 50;

/// A group, which may not exist yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Group {
    version: Version,
    /// The group that the threads come from and return to.
    parent: PathBuf,
    dir: PathBuf,
    /// With version 2, a parent enables the CPU controller for its groups only on request.
    enable: bool,
}

impl Group {
    /// The place of a group for this thread of `pid`: below the thread's own group.
    pub(crate) fn place(pid: u32, thread: u32) -> Result<Self, QuotaError> {
        let of = |path: String| fs::read_to_string(&path).at("reading", Path::new(&path));
        let is_seen =
            |at: &Path| ["tasks", "cgroup.procs"].iter().any(|file| at.join(file).exists());
        let mount = mount(&of("/proc/self/mountinfo".to_owned())?, Controller::Cpu, is_seen);
        let mount = mount.ok_or(QuotaError::NoController)?;
        let parent = mount.group(&of(format!("/proc/{pid}/task/{thread}/cgroup"))?);
        let parent = parent.filter(|dir| dir.is_dir()).ok_or(QuotaError::NoController)?;
        Self::below(parent, mount.version, pid)
    }

    fn below(parent: PathBuf, version: Version, pid: u32) -> Result<Self, QuotaError> {
        let has = |file: &str| names_cpu(&parent.join(file)).unwrap_or(false);
        let enable = version == Version::V2 && !has(SUBTREE);
        if enable && !has("cgroup.controllers") {
            return Err(QuotaError::NotDelegated { group: parent });
        }
        let dir = parent.join(format!("{PREFIX}{pid}"));
        Ok(Self { version, parent, dir, enable })
    }

    /// Whether it is the same directory.
    pub(crate) fn is_at(&self, other: &Self) -> bool {
        // By bytes, because there may be hundreds to compare.
        self.dir.as_os_str() == other.dir.as_os_str()
    }

    pub(crate) fn by(&self) -> String {
        let version = match self.version {
            Version::V1 => 1,
            Version::V2 => 2,
        };
        format!("cgroup v{version}")
    }

    /// Whether threads could be moved here and back. Writes nothing.
    pub(crate) fn check(&self) -> Result<(), QuotaError> {
        let threads = self.parent.join(self.threads());
        OpenOptions::new().write(true).open(&threads).map(drop).at("writing to", &threads)
    }

    /// Creates it, without threads and without a quota.
    pub(crate) fn make(&self) -> Result<(), QuotaError> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).at("making", &self.dir);
            }
            _ => {}
        }
        if self.version == Version::V2 {
            // The order matters: a group with processes may enable a controller for groups of
            // threads only once it is the root of threaded groups.
            write(&self.dir, "cgroup.type", "threaded")?;
            if self.enable {
                write(&self.parent, SUBTREE, "+cpu")?;
            }
        }
        Ok(())
    }

    pub(crate) fn add_thread(&self, thread: u32) -> Result<(), QuotaError> {
        write(&self.dir, self.threads(), &thread.to_string())
    }

    pub(crate) fn set(&self, quota: Option<Quota>) -> Result<(), QuotaError> {
        match (self.version, quota) {
            (Version::V1, Some(quota)) => {
                // With a shorter period, the old quota could exceed the parent's: first remove the
                // quota, then set the period.
                write(&self.dir, "cpu.cfs_quota_us", "-1")?;
                write(&self.dir, "cpu.cfs_period_us", &quota.period_us.to_string())?;
                write(&self.dir, "cpu.cfs_quota_us", &quota.quota_us.to_string())
            }
            (Version::V1, None) => write(&self.dir, "cpu.cfs_quota_us", "-1"),
            (Version::V2, Some(quota)) => {
                let text = format!("{} {}", quota.quota_us, quota.period_us);
                write(&self.dir, "cpu.max", &text)
            }
            (Version::V2, None) => write(&self.dir, "cpu.max", "max"),
        }
    }

    /// Returns its threads to the parent and removes it, if it exists.
    pub(crate) fn lift(&self) -> Result<(), QuotaError> {
        if !self.dir.exists() {
            // A run that was killed may have removed it, and not reached `disable`.
            return self.disable();
        }
        // No thread stays throttled, whatever fails below.
        if let Err(error) = self.set(None) {
            tracing::debug!(%error, "lifting a quota");
        }
        self.remove(|dir| fs::remove_dir(dir))
    }

    /// Empties it and removes it by `remove_dir`.
    fn remove(&self, remove_dir: impl Fn(&Path) -> io::Result<()>) -> Result<(), QuotaError> {
        let mut tries_left = REMOVE_TRIES;
        loop {
            self.empty()?;
            tries_left -= 1;
            match remove_dir(&self.dir) {
                Ok(()) => return self.disable(),
                Err(error) if error.kind() == ErrorKind::NotFound => return self.disable(),
                // A thread was started meanwhile, or one that has ended is still counted.
                Err(error) if error.kind() == ErrorKind::ResourceBusy && tries_left > 0 => {
                    std::thread::yield_now();
                }
                Err(error) => return Err(error).at("removing", &self.dir),
            }
        }
    }

    fn empty(&self) -> Result<(), QuotaError> {
        let list = self.dir.join(self.threads());
        let threads = match fs::read_to_string(&list) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            threads => threads.at("reading", &list)?,
        };
        for thread in threads.split_whitespace() {
            match write_io(&self.parent.join(self.threads()), thread) {
                // The thread has ended.
                Err(error) if error.raw_os_error() == Some(ESRCH) => {}
                moved => moved.at("moving a thread to", &self.parent)?,
            }
        }
        Ok(())
    }

    /// Restores the parent's controllers, unless another of our groups still needs them.
    fn disable(&self) -> Result<(), QuotaError> {
        let others = || {
            let dirs = fs::read_dir(&self.parent).into_iter().flatten().flatten();
            dirs.map(|dir| dir.file_name()).any(|name| name.to_string_lossy().starts_with(PREFIX))
        };
        if !self.enable || others() {
            return Ok(());
        }
        let path = self.parent.join(SUBTREE);
        // It was never enabled where groups can't be made, such as in a container whose cgroups are
        // read-only: there is nothing to restore, and that would be refused as well.
        if names_cpu(&path).is_ok_and(|is_enabled| !is_enabled) {
            return Ok(());
        }
        match write_io(&path, "-cpu") {
            // The VM has ended, and its groups no longer exist.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.at("writing to", &path),
        }
    }

    fn threads(&self) -> &'static str {
        match self.version {
            Version::V1 => "tasks",
            Version::V2 => "cgroup.threads",
        }
    }
}

const ESRCH: i32 = 3;

/// Whether a list of controllers contains the one for CPU time.
fn names_cpu(list: &Path) -> io::Result<bool> {
    let text = fs::read_to_string(list)?;
    Ok(text.split_whitespace().any(|controller| controller == "cpu"))
}

fn write(dir: &Path, file: &str, text: &str) -> Result<(), QuotaError> {
    let path = dir.join(file);
    write_io(&path, text).at("writing to", &path)
}

/// Writes in one system call, so that its error is the kernel's answer.
fn write_io(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests;
