//! A VM's QEMU: started, reopened or attached; and ended.

mod error;
mod found;
mod guest;
mod inherit_error;
mod inherited;
mod monitor_names;
mod open_files;
mod pid_file;
mod ram_files;
mod replaced;
mod shared_ram;
mod started;
mod taken_over;
mod taps;
mod vnc;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::command_line::CommandLine;
use crate::environment;
use crate::process::{Process, ProcessError, ProcessId, Until, command_line_of, user_of};
use crate::qmp::{Qmp, QmpError};
use crate::shape;

pub use error::StartError;
pub use found::{attach, reopen};
pub use inherit_error::InheritError;
pub use inherited::{Inherited, InheritedSockets};
pub use shared_ram::SharedRam;
pub use started::{
    By, GuestPort, NO_GUEST_PORT, Start, UP_MAX, start, start_next, start_reporting,
};
pub use taps::{FormerTaps, JoiningTaps, NextTaps, Waiting};

/// How long QEMU may take to end by itself before it is killed.
const QUIT_WAIT: Duration = Duration::from_secs(10);
const QUIT_ASK: Duration = Duration::from_secs(2);

/// A VM's QEMU.
///
/// Dropping it ends nothing: QEMU outlives the agent, and is found again by
/// its [`Record`].
#[derive(Debug)]
pub struct Machine {
    /// Its process.
    pub process: Process,
    /// Its QMP connection.
    pub qmp: Arc<Qmp>,
    /// QEMU's command line, as its owner typed it.
    pub argv: Vec<String>,
    /// The directory at which relative paths in it start.
    pub cwd: PathBuf,
    /// QEMU's version.
    pub version: String,
    /// The directory for what must survive the agent.
    pub dir: PathBuf,
    /// Notes for the operator when it moves.
    pub notes: Vec<String>,
    /// Whether it was started with a port for the helper in the guest, which its
    /// command line doesn't show.
    pub guest_port: bool,
    /// Whether migrations to this QEMU keep the timers by which its network cards announce
    /// themselves. Those by earlier agents removed them.
    keeps_announce_timers: bool,
    /// Held while a thread uses the guest's port.
    port_turn: Mutex<()>,
    /// See [`Machine::is_one_of_two`].
    one_of_two: AtomicBool,
    socket: PathBuf,
    log: Option<PathBuf>,
}

/// How to find a [`Machine`] again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    process: ProcessId,
    socket: PathBuf,
    log: Option<PathBuf>,
    argv: Vec<String>,
    cwd: PathBuf,
    #[serde(default)]
    notes: Vec<String>,
    #[serde(default)]
    guest_port: bool,
    /// Missing in earlier agents' records.
    #[serde(default)]
    keeps_announce_timers: bool,
    /// See [`Machine::dir`]. None in earlier agents' records: the VM's own directory.
    #[serde(default)]
    dir: Option<PathBuf>,
}

impl Record {
    /// QEMU's process, for messages about one that has exited.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Whether both are of the same process.
    #[must_use]
    pub fn is_of(&self, other: &Self) -> bool {
        self.process == other.process
    }

    /// Whether that process has exited; false if that isn't known.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        matches!(Process::find(&self.process), Err(ProcessError::Exited { .. }))
    }

    /// Whether that process does nothing any more: it has exited, or is about to. False if that isn't
    /// known.
    #[must_use]
    pub fn has_halted(&self) -> bool {
        match Process::find(&self.process) {
            Ok(process) => process.has_halted(),
            Err(error) => matches!(error, ProcessError::Exited { .. }),
        }
    }

    /// Ends that process by force, and so the VM, whoever has a connection to it, and waits until
    /// it has ended so far.
    ///
    /// # Errors
    /// If it may not have.
    pub fn end(&self, until: Until) -> Result<(), ProcessError> {
        match Process::find(&self.process) {
            Ok(process) => process.end(until, QUIT_WAIT),
            Err(ProcessError::Exited { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// QEMU's command line, as its owner typed it.
    #[must_use]
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// The directory for what must survive the agent; none in records of earlier agents, which had
    /// one directory for each VM.
    #[must_use]
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }
}

impl Machine {
    /// How to find it again.
    #[must_use]
    pub fn record(&self) -> Record {
        Record {
            process: self.process.id().clone(),
            socket: self.socket.clone(),
            log: self.log.clone(),
            argv: self.argv.clone(),
            cwd: self.cwd.clone(),
            notes: self.notes.clone(),
            guest_port: self.guest_port,
            keeps_announce_timers: self.keeps_announce_timers,
            dir: Some(self.dir.clone()),
        }
    }

    /// Whether QEMU may crash when the guest resets a network card, as in a reboot: an earlier
    /// agent had the VM loaded here, and QEMU removed the timer of a virtio card then, which it
    /// still uses. What can't be read counts against it.
    #[must_use]
    pub fn may_crash_at_reset(&self) -> bool {
        if self.keeps_announce_timers {
            return false;
        }
        let running = command_line_of(self.process.pid());
        running.map_or(true, |argv| CommandLine::waited(&argv))
            && shape::has_virtio_net(&self.qmp).unwrap_or(true)
    }

    /// Whether its program was replaced on disk since it started, as an upgrade of its package does.
    /// False as well if that can't be read.
    #[must_use]
    pub fn runs_replaced_program(&self) -> bool {
        replaced::is_replaced(self.process.pid())
    }

    /// Whether it runs this file. False as well if that can't be read, and for a script, which is
    /// another file than the program that it starts.
    #[must_use]
    pub fn runs_program(&self, program: &Path) -> bool {
        replaced::runs(self.process.pid(), program)
    }

    /// Notes whether the VM has another QEMU on this host. Two have the same listening sockets: in
    /// order, a QEMU ends by removing their names, so as long as there are two, it is killed.
    pub fn is_one_of_two(&self, is: bool) {
        self.one_of_two.store(is, Relaxed);
    }

    /// This QEMU, connected to again.
    ///
    /// # Errors
    /// As [`reopen`].
    pub fn reopened(&self) -> Result<Self, StartError> {
        let again = reopen(&self.record(), &self.dir)?;
        again.is_one_of_two(self.one_of_two.load(Relaxed));
        Ok(again)
    }

    /// Variables of its environment that a QEMU lacks which an agent starts with its command line:
    /// see [`environment::not_inherited`].
    #[must_use]
    pub fn missing_environment(&self) -> Vec<String> {
        let pid = self.process.pid();
        let running = command_line_of(pid).unwrap_or_default();
        // A script on the command line sets at the destination what it has set here.
        if running.first() == self.argv.first() {
            environment::not_inherited(pid)
        } else {
            Vec::new()
        }
    }

    /// Whether another program started it.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.log.is_none()
    }

    /// The file with QEMU's stdout and stderr; `None` for an attached VM.
    #[must_use]
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    /// Ends QEMU, and with it the VM: by QMP, else by force; at once if it
    /// [is one of two](Machine::is_one_of_two).
    ///
    /// # Errors
    /// If even the kernel can't end it in time.
    pub fn quit(&self) -> Result<(), ProcessError> {
        let user = user_of(self.process.pid()).ok();
        if self.one_of_two.load(Relaxed) {
            self.process.kill()?;
        } else {
            self.ask_to_quit()?;
        }
        if self.process.wait_exited(QUIT_WAIT).is_err() {
            self.process.kill()?;
            self.process.wait_exited(QUIT_WAIT)?;
        }
        if !self.is_attached() {
            // The VM's other QEMU may have them, or get them.
            if !self.one_of_two.load(Relaxed) {
                self.remove_left(user.as_ref());
            }
            // QEMU may have removed them.
            let _ = std::fs::remove_file(&self.socket);
            let _ = std::fs::remove_file(guest_socket(&self.dir));
        }
        Ok(())
    }

    fn ask_to_quit(&self) -> Result<(), ProcessError> {
        match self.qmp.execute_within("quit", json!({}), QUIT_ASK) {
            // It may exit before its answer is read.
            Ok(_) | Err(QmpError::Closed) => Ok(()),
            Err(error) => {
                tracing::warn!(pid = self.process.pid(), %error, "QEMU doesn't quit; ending it");
                self.process.kill()
            }
        }
    }
}

/// Where QEMU listens for the agent's commands.
fn qmp_socket(dir: &Path) -> PathBuf {
    dir.join("qmp")
}

/// Where it listens for the helper in the guest. No longer than the other one: the length of a
/// socket's path is limited.
fn guest_socket(dir: &Path) -> PathBuf {
    dir.join("gst")
}
