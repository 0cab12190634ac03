//! A running `droveway migrate`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use api::{Audited, Phase, Report};
use lab::fatal::{Kind, fatal};
use rustix::process::{Pid, Signal, kill_process};

use crate::until;

/// Longest time that a migration may take, on a busy machine too. A longer one is cancelled, which
/// ends its test.
const MIGRATION_MAX: Duration = Duration::from_secs(120);
/// Longest permitted downtime, in seconds, unless a test chooses another: ten times the usual one.
pub(crate) const BLACKOUT_MAX_S: &str = "30";

/// `droveway migrate --json`, running.
pub struct Moving {
    child: Child,
    /// Reads standard output at once: a report doesn't fit a pipe, so a test that waits for a
    /// missing line would otherwise wait for ever.
    output: JoinHandle<String>,
    lines: BufReader<ChildStderr>,
    said: String,
    /// Dropped with this, it ends the watch.
    _over: Sender<()>,
}

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Whether its exit code says that the VM has moved.
    pub success: bool,
    /// Its report.
    pub report: Report,
    /// Its standard error.
    pub said: String,
}

impl Ended {
    /// Asserts that every page was as QEMU had handed it over, and that RAM was read back, unless
    /// the test asked for less.
    ///
    /// # Panics
    /// If not.
    pub fn assert_audited(&self) {
        let audit = &self.report.audit;
        let is_clean = match audit {
            Audited::Same { pages, .. } => *pages > 0,
            // A stream that was passed through as a whole has nothing to compare.
            Audited::Nothing { .. } => self.report.tap == "whole",
            Audited::Differences { .. } => {
                fatal(Kind::WrongPage, format_args!("{audit:?}\n{}", self.said))
            }
        };
        assert!(is_clean, "{audit:?}\n{}", self.said);
    }
}

/// Completes the command for a test's move, where the test chooses nothing else: it is audited as
/// deeply as possible, and no VM is taken back only because the machine is busy.
pub(crate) fn complete(migrate: &mut Vec<&str>) {
    audited_deeply(migrate);
    if !migrate.contains(&"--blackout-max") {
        migrate.extend(["--blackout-max", BLACKOUT_MAX_S]);
    }
}

/// Has the command audit as deeply as possible, unless the test chooses something else.
pub(crate) fn audited_deeply(command: &mut Vec<&str>) {
    if !command.contains(&"--audit") {
        command.extend(["--audit", "deep"]);
    }
}

impl Moving {
    pub(crate) fn new(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        let mut stdout = child.stdout.take().unwrap();
        let output = thread::spawn(move || {
            let mut output = String::new();
            stdout.read_to_string(&mut output).unwrap();
            output
        });
        let (over, watch) = channel();
        let pid = child.id();
        thread::spawn(move || {
            if watch.recv_timeout(MIGRATION_MAX) == Err(RecvTimeoutError::Timeout) {
                interrupt(pid);
            }
        });
        Self { child, output, lines, said: String::new(), _over: over }
    }

    /// Waits until it prints that it is in a phase.
    ///
    /// # Panics
    /// If it ends before.
    pub fn wait_for(&mut self, phase: Phase) {
        let shown = match phase {
            Phase::Prepare => "  preparing",
            Phase::FirstPass => "  first pass",
            Phase::LaterPass => "  pass ",
            Phase::Stopped => "  stopped",
            other => panic!("{other:?} may be over before it is shown"),
        };
        self.wait_line(shown);
    }

    /// Waits until it prints a text.
    ///
    /// # Panics
    /// If it ends before.
    pub fn wait_line(&mut self, text: &str) {
        self.wait_until(text, |line| line.contains(text));
    }

    /// Waits until it prints this pass, or a later one.
    ///
    /// # Panics
    /// If it ends before.
    pub fn wait_pass(&mut self, pass: u32) {
        let shown = |line: &str| {
            let (_, rest) = line.split_once("  pass ")?;
            rest.split(' ').next()?.parse::<u32>().ok()
        };
        let what = format!("pass {pass}");
        self.wait_until(&what, |line| shown(line).is_some_and(|it| it >= pass));
    }

    fn wait_until(&mut self, what: &str, is_it: impl Fn(&str) -> bool) {
        loop {
            let mut line = String::new();
            let read = self.lines.read_line(&mut line).unwrap();
            self.said.push_str(&line);
            assert_ne!(read, 0, "it ended before it said {what:?}: {}", self.said);
            if is_it(&line) {
                return;
            }
        }
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// If that isn't known.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Interrupts it, as Ctrl-C does.
    pub fn interrupt(&self) {
        interrupt(self.child.id());
    }

    /// Waits for its end, and for its report.
    ///
    /// # Panics
    /// If there is no report.
    #[must_use]
    pub fn wait(self) -> Ended {
        let (success, output, said) = self.wait_any();
        let report = serde_json::from_str(&output)
            .unwrap_or_else(|error| panic!("no report: {error}\n{output}\n{said}"));
        Ended { success, report, said }
    }

    /// Waits for its end, whatever the result. Returns whether its exit code says that the VM has
    /// moved, its standard output, and its standard error.
    ///
    /// # Panics
    /// If its output isn't text.
    #[must_use]
    pub fn wait_any(self) -> (bool, String, String) {
        let (status, output, said) = self.wait_status();
        (status == Some(0), output, said)
    }

    /// The same with its exit code; none if a signal ended it.
    ///
    /// # Panics
    /// If its output isn't text.
    #[must_use]
    pub fn wait_status(mut self) -> (Option<i32>, String, String) {
        self.lines.read_to_string(&mut self.said).unwrap();
        let status = self.child.wait().unwrap();
        (status.code(), self.output.join().unwrap(), self.said)
    }
}

fn interrupt(pid: u32) {
    signal(pid, Signal::INT);
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// Kills a process, as a crash would.
pub fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Asks a process to end, as systemd does.
pub fn terminate(pid: u32) {
    signal(pid, Signal::TERM);
}

/// A process that is stopped until this is dropped.
pub struct Frozen(u32);

impl Frozen {
    /// Stops a process, and returns once all its threads have stopped: one thread has to run once
    /// more to stop the others, and on a busy machine these may answer a peer before.
    #[must_use]
    pub fn new(pid: u32) -> Self {
        signal(pid, Signal::STOP);
        until("it stands still", || stands_still(pid));
        Self(pid)
    }
}

/// Whether no thread of a process runs: each is stopped, or gone.
fn stands_still(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.filter_map(Result::ok).all(|thread| {
        let Ok(stat) = fs::read_to_string(thread.path().join("stat")) else { return true };
        // The state follows the name, which may contain anything; it is `t` if the thread is
        // traced.
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't', 'Z', 'X']))
    })
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}
