//! Why a VM could not be started or found.

use std::io;
use std::path::PathBuf;

use ram::RamError;

use crate::command_line::CommandLineError;
use crate::launch::LaunchError;
use crate::process::ProcessError;
use crate::qmp::QmpError;

/// Why a VM could not be started or found. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its command line.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// Its directory.
    #[error("the VM's directory {} can't be used: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket for QMP.
    #[error(
        "no QMP socket can be made at {}: {source} (its path may have 107 bytes at most)",
        path.display()
    )]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its RAM.
    #[error("the VM's RAM `{id}` can't be made: {}", chain(source))]
    Ram {
        /// Which.
        id: String,
        /// Why.
        source: RamError,
    },
    /// No room for its RAM.
    #[error(
        "no room for the VM: it has {} MiB of RAM, and this host has {} MiB to give",
        needed >> 20,
        available >> 20
    )]
    NoRoom {
        /// What it needs.
        needed: u64,
        /// What is there.
        available: u64,
    },
    /// QEMU can't be executed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// QEMU ended at once.
    #[error("QEMU ended while it started: {words}")]
    Ended {
        /// What it wrote.
        words: String,
    },
    /// QEMU is there but QMP isn't.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's process.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The RAM of a VM found again is not where it was.
    #[error("QEMU {pid} no longer has the RAM `{id}` open that the agent made for it")]
    RamLost {
        /// QEMU.
        pid: u32,
        /// Which RAM.
        id: String,
    },
}

/// An error of the RAM with what the kernel said.
fn chain(error: &RamError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
