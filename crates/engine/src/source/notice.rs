//! Notices from the threads of a migration to its leading thread.

use crate::error::MigrationError;

/// A notice from one of the migration's threads to the leading thread.
pub(crate) enum Notice {
    /// The block list is known: QEMU starts with RAM.
    FirstPassBegins,
    /// RAM has ended on the main connection; the tail of the non-RAM stream follows.
    TailBegins,
    /// The stream is passed through whole, for this reason.
    Unsplittable(String),
    /// The barrier: all pages are placed, or an error.
    Placed(Result<(), MigrationError>),
    /// A thread that the migration needs has panicked; its name.
    Panicked(String),

    // Of the agent's own migrations.
    /// All disks were copied once, and are kept in sync.
    DisksReady,
    /// The mirrors have written all of the stopped VM's disks, or one failed.
    Disks(Result<(), String>),
    /// The VM does not converge, even fully throttled.
    Stalled(String),

    // Of domains of Xen.
    /// xl has sent most of memory once: it may suspend the domain soon.
    FirstPassEnds,

    // Of carried migrations.
    /// From here on the stream is passed through unchanged, for this reason.
    SplitEnds(String),
    /// RAM has ended on all connections: every page is handed on.
    RamOver,
    /// A page arrived after that.
    PageAfterRam,
    /// QEMU, or xl, has closed its connections, or its stream can't be read.
    Ended(Result<(), MigrationError>),
}
