//! What the threads of a migration that is carried tell the one that leads it.

use crate::error::MigrationError;

/// Something that threads of this migration tell the one that leads it.
pub(super) enum Notice {
    /// The block list is known.
    FirstPassBegins,
    /// RAM has ended on the main connection.
    TailBegins,
    /// And on all others: every page is handed on.
    RamOver,
    /// One more came after that.
    PageAfterRam,
    /// The stream is passed through whole after all, and why.
    Unsplittable(String),
    /// From here on it is passed through as it is, and why.
    SplitEnds(String),
    /// All pages are placed, or can't be.
    Placed(Result<(), MigrationError>),
    /// QEMU has closed its connections, or its stream can't be read.
    Ended(Result<tap::Summary, MigrationError>),
    /// A thread of this name has panicked.
    Panicked(String),
}
