//! Notices from the threads of a carried migration to its leading thread.

use crate::error::MigrationError;

/// A notice from one of the migration's threads to the leading thread.
pub(super) enum Notice {
    /// The block list is known.
    FirstPassBegins,
    /// RAM has ended on the main connection.
    TailBegins,
    /// RAM has ended on all connections: every page is handed on.
    RamOver,
    /// A page arrived after that.
    PageAfterRam,
    /// The stream is passed through whole after all, for this reason.
    Unsplittable(String),
    /// From here on the stream is passed through unchanged, for this reason.
    SplitEnds(String),
    /// All pages are placed, or an error.
    Placed(Result<(), MigrationError>),
    /// QEMU has closed its connections, or its stream can't be read.
    Ended(Result<tap::Summary, MigrationError>),
    /// A thread has panicked; its name.
    Panicked(String),
}
