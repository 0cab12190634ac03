//! Programs that are run for what they print, and the time that a child has to exit.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

/// For a process that is killed: it exits at once, unless it waits in the kernel.
pub const KILLED_MAX: Duration = Duration::from_secs(5);
/// The most bytes of a program's errors that are read.
const ERRORS_BYTES_MAX: u64 = 1 << 20;

/// Killed processes that have not exited in time. Each is reaped before a later program starts, or
/// it would keep its number until the agent exits.
static LEFT_BEHIND: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// A program that is run for what it prints. It is killed when this is dropped, if it has not
/// exited.
#[derive(Debug)]
pub struct Run {
    /// Its process.
    pub child: Child,
    /// What it prints.
    pub out: UnixStream,
    errors: UnixStream,
    program: String,
    silent_max: Duration,
}

impl Run {
    /// Starts a program, in `/` and with English texts. It may be silent for `silent_max`.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(mut command: Command, silent_max: Duration) -> io::Result<Self> {
        reap();
        // Sockets and not pipes, since their reads can time out.
        let (out, child_out) = UnixStream::pair()?;
        let (errors, child_errors) = UnixStream::pair()?;
        for end in [&out, &errors] {
            end.set_read_timeout(Some(silent_max))?;
        }
        command.env("LC_ALL", "C").current_dir("/");
        command.stdout(OwnedFd::from(child_out)).stderr(OwnedFd::from(child_errors));
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn()?;
        // It still holds the child's ends of the sockets.
        drop(command);
        Ok(Self { child, out, errors, program, silent_max })
    }

    /// Reads what it prints, up to `bytes_max`, and then what it prints as errors. One that prints
    /// more than is read, or many errors first, counts as silent once the sockets are full.
    ///
    /// # Errors
    /// If it is silent for too long.
    pub fn read(&self, bytes_max: u64) -> io::Result<(Vec<u8>, Vec<u8>)> {
        let (mut out, mut errors) = (Vec::new(), Vec::new());
        (&self.out).take(bytes_max).read_to_end(&mut out)?;
        (&self.errors).take(bytes_max.min(ERRORS_BYTES_MAX)).read_to_end(&mut errors)?;
        Ok((out, errors))
    }

    /// How it exited; none if it hangs, although it may have closed its output.
    ///
    /// # Errors
    /// If that is not known.
    pub fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        if !exits_within(&mut self.child, self.silent_max) {
            return Ok(None);
        }
        self.child.wait().map(Some)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // It fails if it has exited, as it should have.
        let _ = self.child.kill();
        if !exits_within(&mut self.child, KILLED_MAX) {
            let (program, pid) = (&self.program, self.child.id());
            tracing::error!(program, pid, "a program hangs, and can't be killed");
            leave_behind(&self.child);
        }
    }
}

fn leave_behind(child: &Child) {
    LEFT_BEHIND.lock().unwrap_or_else(PoisonError::into_inner).push(Pid::from_child(child));
}

/// Reaps those that have exited meanwhile.
fn reap() {
    let mut left = LEFT_BEHIND.lock().unwrap_or_else(PoisonError::into_inner);
    left.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
}

/// Whether the child exits in time. One that can't be watched gets none.
pub fn exits_within(child: &mut Child, limit: Duration) -> bool {
    // Once it was reaped, its id may be another process's.
    if matches!(child.try_wait(), Ok(Some(_))) {
        return true;
    }
    if let Ok(pidfd) = pidfd_open(Pid::from_child(child), PidfdFlags::empty()) {
        let until = Instant::now() + limit;
        let wait = || {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], left.as_ref())
        };
        // A signal to the agent, such as the one that stops it, must not count as a child that
        // hangs. Whatever else this returns, the child is asked.
        while wait() == Err(Errno::INTR) {}
    }
    matches!(child.try_wait(), Ok(Some(_)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Stdio;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    fn sleeping() -> Child {
        sh("exec sleep 600").spawn().unwrap()
    }

    fn exists(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}")).exists()
    }

    #[test]
    fn what_a_program_prints_is_read_with_its_status() {
        let mut run = Run::start(sh("pwd; echo $LC_ALL >&2; exit 3"), LONG).unwrap();
        let (out, errors) = run.read(100).unwrap();
        assert_eq!((out, errors), (b"/\n".to_vec(), b"C\n".to_vec()));
        assert_eq!(run.status().unwrap().and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn one_that_prints_without_end_is_read_up_to_the_bound_and_killed() {
        let run = Run::start(sh("exec yes 2>&-"), LONG).unwrap();
        let (out, errors) = run.read(1000).unwrap();
        assert_eq!((out.len(), errors.len()), (1000, 0));
        let pid = run.child.id();
        assert!(exists(pid));
        drop(run);
        assert!(!exists(pid), "it is killed and reaped");
    }

    #[test]
    fn one_that_hangs_with_its_output_closed_has_no_status() {
        let hangs = sh("exec sleep 600 >&- 2>&-");
        let mut run = Run::start(hangs, Duration::from_millis(500)).unwrap();
        assert!(run.status().unwrap().is_none());
    }

    #[test]
    #[expect(
        clippy::zombie_processes,
        reason = "another part waits for it here, as the test shows"
    )]
    fn one_that_is_left_behind_is_reaped_once_it_has_exited() {
        let mut child = sleeping();
        leave_behind(&child);
        reap();
        assert!(exists(child.id()), "it runs");
        child.kill().unwrap();
        while exists(child.id()) {
            reap();
            thread::yield_now();
        }
    }
}
