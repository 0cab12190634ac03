//! For tests: a directory that ends the processes that were started in it.
//!
//! QEMU outlives the process that started it by design, also a failed test. QEMU and agents write
//! their output to a log in the test's directory, which identifies them.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A killed process ends sooner than this.
const GONE_MAX: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Makes firmware in this directory that halts the CPU at once, for VMs whose guests need do
/// nothing. QEMU's own is emulated for a while, to find nothing to boot.
///
/// # Panics
/// If that fails.
#[must_use]
pub fn firmware(dir: &Path) -> PathBuf {
    const HLT: u8 = 0xf4;
    let path = dir.join("halts.bin");
    // By a rename: other tests may use it meanwhile.
    let new = tempfile::NamedTempFile::new_in(dir).expect("a file for the test");
    fs::write(new.path(), [HLT; 64 << 10]).expect("room for the test's file");
    new.persist(&path).expect("a place for the test's file");
    path
}

/// A directory that is removed on drop, after all processes whose standard output is a file in it
/// are killed.
#[derive(Debug)]
pub struct TestDir(tempfile::TempDir);

impl TestDir {
    /// Makes a temporary directory.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "a directory is no default")]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory for the test"))
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let killed: Vec<OwnedFd> = processes().filter_map(|pid| end(pid, self.path())).collect();
        for pidfd in killed {
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&GONE_MAX));
        }
    }
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Kills the process if its standard output is a file in `dir`.
fn end(pid: i32, dir: &Path) -> Option<OwnedFd> {
    // Opened before the check, so that the PID can't be reused in between.
    let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let output = fs::read_link(format!("/proc/{pid}/fd/1")).ok()?;
    if !output.starts_with(dir) {
        return None;
    }
    eprintln!("a test leaves process {pid}: ended");
    pidfd_send_signal(&pidfd, Signal::KILL).ok()?;
    Some(pidfd)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_processes_that_write_into_it_are_killed() {
        let dir = TestDir::new();
        let other = TestDir::new();
        let start = |dir: &TestDir| {
            let log = fs::File::create(dir.path().join("log")).unwrap();
            Command::new("cat").stdin(Stdio::piped()).stdout(log).spawn().unwrap()
        };
        let (mut ours, mut theirs) = (start(&dir), start(&other));
        let path = dir.path().to_owned();
        drop(dir);
        assert!(!ours.wait().unwrap().success());
        assert!(!path.exists());
        assert_eq!(theirs.try_wait().unwrap(), None);
        drop(other);
        assert!(!theirs.wait().unwrap().success());
    }
}
