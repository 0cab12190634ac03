//! Failures of mirrors.

use std::fmt;
use std::time::Duration;

use crate::qmp::QmpError;

/// Which end of a mirror failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Reading the disk here.
    Source,
    /// Writing it there, or the connection to it.
    Target,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "it can't be read here",
            Self::Target => "it can't be written at the destination",
        })
    }
}

/// Why a disk is not mirrored, or no longer. The VM and its disk are unharmed.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// Reading or writing failed.
    #[error("disk `{disk}` can't move: {side}: {reason}")]
    Failed {
        /// The disk.
        disk: String,
        /// Which end.
        side: Side,
        /// QEMU's message.
        reason: String,
    },
    /// Another program ended its job.
    #[error("disk `{disk}` can't move: another program ended its mirror in QEMU")]
    Ended {
        /// The disk.
        disk: String,
    },
    /// The export has another size.
    #[error("disk `{disk}` has {here} bytes, what it is to be mirrored to has {there}")]
    Size {
        /// The disk.
        disk: String,
        /// Its size.
        here: u64,
        /// The export's.
        there: u64,
    },
    /// QEMU refuses.
    #[error("disk `{disk}` can't move: {source}")]
    Qemu {
        /// The disk.
        disk: String,
        /// QEMU's error.
        source: QmpError,
    },
    /// It takes too long.
    #[error("not {what} after {} s: disk {}", waited.as_secs(), disks.join(", "))]
    Late {
        /// The disks.
        disks: Vec<String>,
        /// What they are not.
        what: &'static str,
        /// How long we waited.
        waited: Duration,
    },
    /// The disks' mirrors make no progress.
    #[error("nothing was copied for {} s: disk {}", waited.as_secs(), disks.join(", "))]
    Stalled {
        /// The disks that are not copied.
        disks: Vec<String>,
        /// How long that was.
        waited: Duration,
    },
    /// The VM runs, and has to be stopped first.
    #[error("the VM runs: its disks can't be completed while it writes to them")]
    Running,
    /// There is no mirror of that disk.
    #[error("no mirror of disk `{disk}`")]
    Unknown {
        /// The disk.
        disk: String,
    },
    /// Something could not be removed.
    #[error("disk mirrors can't be removed from QEMU: {0}")]
    Left(String),
    /// QEMU doesn't answer, or has exited.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}
