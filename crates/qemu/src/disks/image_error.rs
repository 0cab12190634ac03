//! Why an image at the destination can't take a disk.

use std::io;
use std::path::PathBuf;

/// An image at the destination can't take a disk that moves.
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
    /// It isn't there.
    #[error("it doesn't exist; make it, or allow it to be made (--create-disks)")]
    Missing,
    /// It can't be made there.
    #[error("its directory isn't there")]
    NoDirectory,
    /// QEMU's user may not do with it what the VM would.
    #[error(
        "the user that QEMU runs as there may not {what}: give it that right, for instance with \
         setfacl"
    )]
    Closed {
        /// What it may not do.
        what: &'static str,
    },
    /// It has no place in a file system.
    #[error("it is neither a file nor a block device")]
    Odd,
    /// Its path can't be used.
    #[error("its path is not absolute")]
    Relative,
    /// Another disk moves there.
    #[error("disk `{other}` moves there too")]
    Twice {
        /// The other disk.
        other: String,
    },
    /// It is smaller or larger: the guest must not see its disk change.
    #[error("it has {here} bytes, the disk has {wanted}")]
    Size {
        /// Its size.
        here: u64,
        /// The disk's.
        wanted: u64,
    },
    /// There is something in it.
    #[error("it holds data; allow it to be overwritten (--overwrite-disks), or remove it")]
    NotEmpty,
    /// It is what the VM runs from.
    #[error("it is the source's own image: on shared storage a disk stays where it is")]
    Same,
    /// It may be what the VM runs from.
    #[error(
        "it can't be shown to be another image than the source's ({reason}), and copying an image \
         onto itself destroys it; remove it and allow it to be made (--create-disks)"
    )]
    Unsure {
        /// Why not.
        reason: String,
    },
    /// Somebody uses it.
    #[error("it is in use: {words}")]
    InUse {
        /// The words of who found out.
        words: String,
    },
    /// There is an image behind it.
    #[error("it has a backing file; what moves is one image: remove it, or flatten it")]
    Backing,
    /// The disk is not one that can be made.
    #[error("the source describes the disk as it can't be: {0}")]
    Impossible(String),
    /// The file system is too small.
    #[error("the disk takes up {needed} bytes, and there is room for {available}")]
    NoRoom {
        /// What the disk takes up at the source.
        needed: u64,
        /// What its file system has.
        available: u64,
    },
    /// The tool says something else.
    #[error("{0}")]
    Tool(String),
    /// The system says something else.
    #[error(transparent)]
    Io(#[from] io::Error),
}
