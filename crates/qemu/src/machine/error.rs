//! Why a VM could not be started or found.

use std::io;
use std::path::PathBuf;

use crate::command_line::CommandLineError;
use crate::launch::LaunchError;
use crate::process::ProcessError;
use crate::qmp::QmpError;

/// Why a VM could not be started or found. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its command line can't be used.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// Its directory can't be used.
    #[error("the VM's directory {} can't be used: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A socket for QMP or for the guest's port can't be made.
    #[error(
        "no socket for QEMU can be created at {}: {source} (its path may have 107 bytes at most)",
        path.display()
    )]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file for RAM that is handed over can't be made.
    #[error("the file {name} for the VM's RAM can't be made: {source}")]
    RamFile {
        /// Its name, which has the kind of its pages.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A VM with too many such files.
    #[error("the VM's RAM has {count} parts to hand over, and can have {max} at most")]
    RamFiles {
        /// How many it has.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// QEMU can't be executed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// QEMU ended at once.
    #[error("QEMU ended while it started: {output}")]
    Ended {
        /// What it wrote.
        output: String,
    },
    /// QEMU runs and doesn't answer: it may wait for a client of one of its sockets.
    #[error("QEMU started and does not answer ({why}); its output: {output}")]
    Silent {
        /// What was waited for.
        why: String,
        /// What it wrote.
        output: String,
    },
    /// QMP answers, and the process of its QEMU can't be found.
    #[error(
        "the QEMU that answers at {} is not visible among this host's processes: run the agent \
         outside of containers, as root or with CAP_SYS_PTRACE",
        path.display()
    )]
    Hidden {
        /// Its QMP socket.
        path: PathBuf,
    },
    /// QEMU runs, and QMP fails.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's process has exited, or can't be watched.
    #[error(transparent)]
    Process(#[from] ProcessError),
}
