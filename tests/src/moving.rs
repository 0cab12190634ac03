//! One `droveway migrate` that is under way.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

use api::Report;
use rustix::process::{Pid, Signal, kill_process};

/// `droveway migrate --json`, running.
pub struct Moving {
    child: Child,
    lines: BufReader<ChildStderr>,
    said: String,
}

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Whether its exit code says that the VM moved.
    pub success: bool,
    /// Its report.
    pub report: Report,
    /// What it said meanwhile.
    pub said: String,
}

impl Moving {
    pub(crate) fn new(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        Self { child, lines, said: String::new() }
    }

    /// Waits until it says that it is in a phase, such as `first pass`.
    ///
    /// # Panics
    /// If it ends without.
    pub fn wait_for(&mut self, phase: &str) {
        loop {
            let mut line = String::new();
            let read = self.lines.read_line(&mut line).unwrap();
            assert_ne!(read, 0, "it ended before its {phase}: {}", self.said);
            self.said.push_str(&line);
            if line.contains(phase) {
                return;
            }
        }
    }

    /// Presses Ctrl-C.
    ///
    /// # Panics
    /// If it has ended.
    pub fn interrupt(&self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).unwrap();
        kill_process(pid, Signal::INT).unwrap();
    }

    /// Waits for its end, which comes with a report.
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

    /// Waits for its end, whatever it is: whether it says that the VM moved,
    /// its standard output, and what it said meanwhile.
    ///
    /// # Panics
    /// If it says something that isn't text.
    #[must_use]
    pub fn wait_any(mut self) -> (bool, String, String) {
        // A report fits no pipe: it is read before standard error ends.
        let mut output = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        self.lines.read_to_string(&mut self.said).unwrap();
        let status = self.child.wait().unwrap();
        (status.success(), output, self.said)
    }
}
