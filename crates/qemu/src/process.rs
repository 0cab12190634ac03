//! A QEMU process, distinguished from any later process with the same id.
//!
//! The agent starts QEMU and has to reap it; after a restart it finds the same
//! QEMU again, which is not its child then. A pidfd serves both, and the
//! start time shows whether a recorded id still belongs to the same process.

mod ending;

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use host::rights::User;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

pub use ending::Until;

/// The identity of a process, in a form that outlives the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its process id.
    pub pid: u32,
    /// When it started, in ticks since the host booted.
    pub start_time: u64,
    /// The id of that boot of the host.
    pub boot: String,
}

/// A process of this host, which may have exited.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    pidfd: OwnedFd,
}

/// Interval of checks how far a process has ended: only its exit is reported.
const END_ASK: Duration = Duration::from_millis(1);

/// What an agent needs that may not inspect a process.
pub(crate) const SEEING_TAKES: &str =
    "run the agent as the user of that QEMU, or as root with CAP_SYS_PTRACE";

/// Why a process can't be watched or ended.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process any more.
    #[error("process {pid} has exited")]
    Exited {
        /// Its process id.
        pid: u32,
    },
    /// It is another user's, or has rights that the agent lacks.
    #[error("the agent may not inspect process {pid}: {SEEING_TAKES}")]
    Denied {
        /// Its process id.
        pid: u32,
    },
    /// The kernel refused.
    #[error("{action} process {pid}: {source}")]
    Local {
        /// What was tried.
        action: &'static str,
        /// Its process id.
        pid: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// It has not ended.
    #[error("process {pid} still exists {} s after SIGTERM", waited.as_secs())]
    Stays {
        /// Its process id.
        pid: u32,
        /// How long that was.
        waited: Duration,
    },
}

impl Process {
    /// The process that has this id now. Its start time was read by id: it is
    /// its own if the process is still alive, or is a child of the agent.
    ///
    /// # Errors
    /// If there is none, or the kernel doesn't permit watching it.
    pub fn now(pid: u32) -> Result<Self, ProcessError> {
        let pidfd = pidfd(pid)?;
        let start_time = start_time(pid)?;
        let boot = boot().map_err(|source| not_seen(pid, source))?;
        Ok(Self { id: ProcessId { pid, start_time, boot }, pidfd })
    }

    /// The process of a record.
    ///
    /// # Errors
    /// [`ProcessError::Exited`] also if another process has its id now. After any
    /// other error it may be alive.
    pub fn find(id: &ProcessId) -> Result<Self, ProcessError> {
        let found = Self::now(id.pid)?;
        if found.id == *id && found.is_alive() {
            Ok(found)
        } else {
            Err(ProcessError::Exited { pid: id.pid })
        }
    }

    /// Its identity, for a record.
    #[must_use]
    pub fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.id.pid
    }

    /// Whether it has not ended. Reaps it if it has, and is a child of the agent.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !self.ended_within(Duration::ZERO)
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// If that is not permitted.
    pub fn terminate(&self) -> Result<(), ProcessError> {
        self.signal(Signal::TERM)
    }

    /// Kills it.
    ///
    /// # Errors
    /// If that is not permitted.
    pub fn kill(&self) -> Result<(), ProcessError> {
        self.signal(Signal::KILL)
    }

    /// Kills it, and blocks until it has ended so far.
    ///
    /// # Errors
    /// If that is not permitted; [`ProcessError::Stays`] after `timeout`.
    pub fn end(&self, until: Until, timeout: Duration) -> Result<(), ProcessError> {
        self.kill()?;
        let deadline = Instant::now() + timeout;
        loop {
            // Its number is its own until it has exited.
            if ending::has_ended(self.id.pid, until) {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let ask = if until == Until::Exited { left } else { left.min(END_ASK) };
            if self.ended_within(ask) {
                return Ok(());
            }
            if left.is_zero() {
                return Err(ProcessError::Stays { pid: self.id.pid, waited: timeout });
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        match rustix::process::pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(self.local("ending", errno)),
        }
    }

    /// Blocks until it has ended.
    ///
    /// # Errors
    /// [`ProcessError::Stays`] after `timeout`.
    pub fn wait_exited(&self, timeout: Duration) -> Result<(), ProcessError> {
        if self.ended_within(timeout) {
            Ok(())
        } else {
            Err(ProcessError::Stays { pid: self.id.pid, waited: timeout })
        }
    }

    /// A descriptor that becomes readable when the process ends, for a caller that polls
    /// several.
    #[must_use]
    pub fn pidfd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The CPU time that its threads have used, in the kernel's ticks; none if it has exited.
    pub(crate) fn cpu_ticks(&self) -> Option<u64> {
        let stat = stat(self.id.pid).ok()?;
        let mut used = stat.split_ascii_whitespace().skip(11).map(str::parse::<u64>);
        Some(used.next()?.ok()? + used.next()?.ok()?)
    }

    fn ended_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut ended, Some(&left)) {
                Ok(0) => return false,
                Ok(_) => {
                    self.reap();
                    return true;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    // Not seen in practice; a process that can't be watched counts
                    // as alive, so that nothing replaces it.
                    tracing::error!(pid = self.id.pid, %errno, "can't watch a process");
                    return false;
                }
            }
        }
    }

    fn reap(&self) {
        let which = WaitId::PidFd(self.pidfd.as_fd());
        // It fails if it is not a child, or was reaped before: both are fine.
        let _ = rustix::process::waitid(which, WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }

    fn local(&self, action: &'static str, errno: Errno) -> ProcessError {
        ProcessError::Local { action, pid: self.id.pid, source: errno.into() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A child that ended must not stay behind as a zombie.
        let _ = self.is_alive();
    }
}

/// A process's command line, which it may have changed itself.
///
/// # Errors
/// If it has exited or the agent may not inspect it.
pub fn command_line_of(pid: u32) -> Result<Vec<String>, ProcessError> {
    let path = proc_path(pid, "cmdline");
    let text = fs::read(path).map_err(|source| not_seen(pid, source))?;
    let text = text.strip_suffix(b"\0").unwrap_or(&text);
    if text.is_empty() {
        return Err(ProcessError::Exited { pid });
    }
    Ok(text.split(|&byte| byte == 0).map(|one| String::from_utf8_lossy(one).into_owned()).collect())
}

/// The directory at which a process's relative paths start.
///
/// # Errors
/// If it has exited or the agent may not inspect it.
pub fn directory_of(pid: u32) -> Result<PathBuf, ProcessError> {
    fs::read_link(proc_path(pid, "cwd")).map_err(|source| not_seen(pid, source))
}

/// The user with whose rights a process opens files.
///
/// # Errors
/// If it has exited or the agent may not inspect it.
pub fn user_of(pid: u32) -> Result<User, ProcessError> {
    let text = fs::read_to_string(proc_path(pid, "status"));
    let text = text.map_err(|source| not_seen(pid, source))?;
    user_in(&text).ok_or_else(|| not_seen(pid, io::ErrorKind::InvalidData.into()))
}

/// Of four ids the last is the one for files.
fn user_in(status: &str) -> Option<User> {
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let numbers = |name| -> Option<Vec<u32>> {
        line(name)?.split_whitespace().map(|number| number.parse().ok()).collect()
    };
    let (uids, gids) = (numbers("Uid:")?, numbers("Gid:")?);
    Some(User { uid: *uids.get(3)?, gid: *gids.get(3)?, groups: numbers("Groups:")? })
}

fn not_seen(pid: u32, source: io::Error) -> ProcessError {
    match source.kind() {
        io::ErrorKind::NotFound => ProcessError::Exited { pid },
        // It ended between the file's opening and its reading.
        _ if source.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
            ProcessError::Exited { pid }
        }
        io::ErrorKind::PermissionDenied => ProcessError::Denied { pid },
        _ => ProcessError::Local { action: "reading", pid, source },
    }
}

pub(crate) fn proc_path(pid: u32, what: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{what}"))
}

fn pidfd(pid: u32) -> Result<OwnedFd, ProcessError> {
    let number =
        i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProcessError::Exited { pid })?;
    rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
        Errno::SRCH => ProcessError::Exited { pid },
        errno => ProcessError::Local { action: "watching", pid, source: errno.into() },
    })
}

/// Field 22 of `/proc/PID/stat`.
fn start_time(pid: u32) -> Result<u64, ProcessError> {
    let stat = stat(pid)?;
    let field = stat.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok());
    field.ok_or_else(|| not_seen(pid, io::ErrorKind::InvalidData.into()))
}

/// The fields of `/proc/PID/stat` from the third on.
fn stat(pid: u32) -> Result<String, ProcessError> {
    stat_at(&proc_path(pid, "stat")).map_err(|source| not_seen(pid, source))
}

/// The fields of a process's or a thread's `stat` from the third on. The name before them may hold
/// spaces and brackets and be no UTF-8, so fields are counted after the last bracket.
fn stat_at(path: &Path) -> io::Result<String> {
    let stat = fs::read(path)?;
    let stat = String::from_utf8_lossy(&stat);
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest.to_owned());
    rest.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The id of the host's current boot.
pub(crate) fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    #[expect(clippy::zombie_processes, reason = "Process reaps it, which is tested")]
    fn a_child_is_seen_ended_and_reaped() {
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::now(child.id()).unwrap();
        assert!(process.is_alive());
        assert!(Process::find(process.id()).is_ok());
        assert!(process.wait_exited(Duration::ZERO).is_err());
        process.kill().unwrap();
        process.wait_exited(Duration::from_secs(10)).unwrap();
        assert!(!process.is_alive());
        assert!(!proc_path(process.pid(), "stat").exists(), "reaped");
        process.kill().unwrap();
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "Process reaps it")]
    fn one_that_is_ended_exits_however_little_is_waited_for() {
        for until in [Until::Halted, Until::Exited] {
            let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let process = Process::now(child.id()).unwrap();
            assert!(!process.has_halted());
            process.end(until, Duration::from_secs(10)).unwrap();
            assert!(process.has_halted());
            process.wait_exited(Duration::from_secs(10)).unwrap();
            process.end(until, Duration::ZERO).unwrap();
        }
    }

    #[test]
    fn another_process_of_the_same_number_is_not_it() {
        let me = Process::now(std::process::id()).unwrap();
        assert!(Process::find(me.id()).is_ok());
        let earlier = ProcessId { start_time: me.id().start_time - 1, ..me.id().clone() };
        assert!(matches!(Process::find(&earlier), Err(ProcessError::Exited { .. })));
        let other_boot = ProcessId { boot: "other".to_owned(), ..me.id().clone() };
        assert!(matches!(Process::find(&other_boot), Err(ProcessError::Exited { .. })));
    }

    #[test]
    fn cpu_time_grows_while_a_process_works() {
        let me = Process::now(std::process::id()).unwrap();
        let before = me.cpu_ticks().unwrap();
        while me.cpu_ticks().unwrap() == before {}
    }

    #[test]
    fn what_a_process_was_started_with() {
        let argv = command_line_of(std::process::id()).unwrap();
        assert_eq!(argv, std::env::args().collect::<Vec<_>>());
        assert_eq!(directory_of(std::process::id()).unwrap(), std::env::current_dir().unwrap());
    }
}
