//! Why an image at the destination can't take a disk.

use std::io;
use std::path::PathBuf;

use crate::command_line::CommandLineError;

/// Why an image at the destination can't take a disk that moves.
#[derive(Debug, thiserror::Error)]
#[error("disk `{disk}` can't move to {}: {problem}", image.display())]
pub struct ImageError {
    /// The disk.
    pub disk: String,
    /// The image at the destination.
    pub image: PathBuf,
    /// Why not.
    pub problem: ImageProblem,
}

/// What is wrong with an image at the destination.
#[derive(Debug, thiserror::Error)]
pub enum ImageProblem {
    /// It doesn't exist.
    #[error("it doesn't exist; create it, or allow Droveway to (--create-disks)")]
    Missing,
    /// It would be, or is, a file among the devices, which is in memory.
    #[error(
        "it is not a block device, and a file in /dev is lost when the host restarts: create the \
         device, or name another image (--set OLD=NEW)"
    )]
    InMemory,
    /// Its directory doesn't exist.
    #[error("its directory doesn't exist")]
    NoDirectory,
    /// QEMU's user lacks rights that the VM needs.
    #[error(
        "the user that QEMU runs as there may not {what}: grant that right, for instance with \
         setfacl"
    )]
    Closed {
        /// What it may not do.
        what: &'static str,
    },
    /// It is something else than an image can be.
    #[error("it is neither a file nor a block device")]
    Odd,
    /// Its path can't be used.
    #[error("its path is not absolute")]
    Relative,
    /// Its path is too long.
    #[error(transparent)]
    Name(CommandLineError),
    /// Another disk moves there.
    #[error("disk `{other}` moves there too")]
    Twice {
        /// The other disk.
        other: String,
    },
    /// It has another size: the guest must not see its disk change.
    #[error("it has {here} bytes, the disk has {wanted}")]
    Size {
        /// Its size.
        here: u64,
        /// The disk's.
        wanted: u64,
    },
    /// It holds data.
    #[error("it holds data; allow it to be overwritten (--overwrite-disks), or remove it")]
    NotEmpty,
    /// The VM runs from it at the source.
    #[error("it is the source's own image: on shared storage a disk stays where it is")]
    Same,
    /// The VM may run from it at the source.
    #[error(
        "it can't be shown to be another image than the source's ({reason}), and copying an image \
         onto itself destroys it; remove it and allow it to be made (--create-disks)"
    )]
    Unsure {
        /// Why not.
        reason: String,
    },
    /// It is in use.
    #[error("it is in use: {output}")]
    InUse {
        /// The message of `qemu-img`.
        output: String,
    },
    /// It has a backing file.
    #[error("it has a backing file; what moves is one image: remove it, or flatten it")]
    Backing,
    /// The source describes a disk that can't exist.
    #[error("the source sent an invalid description of the disk: {0}")]
    Impossible(String),
    /// The file system or the block device is too small.
    #[error(
        "the disk takes up {needed} bytes, and there is room for {available}{}",
        beside(*promised)
    )]
    NoRoom {
        /// What the disk takes up at the source.
        needed: u64,
        /// The room in its file system, or the size of the block device.
        available: u64,
        /// What other disks that arrive have yet to take there; not part of that room.
        promised: u64,
    },
    /// Another error of `qemu-img`.
    #[error("{0}")]
    Tool(String),
    /// Another error of the system.
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn beside(promised: u64) -> String {
    if promised == 0 {
        return String::new();
    }
    format!(" next to {promised} for other disks that arrive there")
}
