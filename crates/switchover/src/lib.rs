//! How a VM changes hands: one VM runs, always.
//!
//! Both sides of a switchover are state machines without I/O:
//! [`source::Machine`] and [`destination::Machine`] take what happened (an
//! `Event`) and return what to do (`Action`s, in order). A [`journal::Journal`]
//! keeps each side's decisions, on disk before anything acts on them, so that
//! an agent that restarts continues where it was. [`source::Driver`] and
//! [`destination::Driver`] join the two for a blocking thread: they perform the
//! actions in order, and a record that can't be written stops those behind it.
//!
//! ```text
//! source       opened  stopped ---------------- committed ------------- (forgotten)
//!                                              |  go ^ loaded   ^ running
//! destination  opened ------------------ loaded -----|--- starting ---- running
//! ```
//!
//! Four rules hold it together:
//! - The source has the VM until `committed` is on its disk, and never again
//!   after, unless the destination says `refused` or an operator decides.
//! - The destination writes `starting` before it runs the VM. So a journal of
//!   the destination without it proves that the VM never ran there.
//! - Each side sends its state again and again, until the other side's answer
//!   ends that; messages may be lost, repeated and late.
//! - A side forgets its journal only when the other side can no longer need
//!   it, and says `unknown` from then on.
//!
//! docs/PROTOCOL.md has the tables. `tests/explorer` walks through every
//! reachable state of both, with crashes between any two actions, and shows
//! that no state runs the VM twice and none loses it.

#![forbid(unsafe_code)]

pub mod destination;
mod doubt;
#[doc(hidden)]
pub mod fuzzing;
pub mod journal;
mod kept;
mod message;
mod migration_id;
mod reason;
pub mod source;

pub use doubt::Doubt;
pub use kept::Kept;
pub use message::{Envelope, ToDestination, ToSource};
pub use migration_id::{MigrationId, NotAnId};
pub use reason::Reason;

use serde::{Deserialize, Serialize};

/// What an agent finds of a VM's QEMU when it reads a journal after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// There is none: it ended, or its host was booted since.
    Gone,
    /// It holds the VM and does not run it: at the source as its migration left
    /// it (`finish-migrate`, `postmigrate`), at the destination `inmigrate` or
    /// `paused`.
    Stopped,
    /// It runs the VM; at the source also one that its owner has paused.
    Runs,
}

/// The decision of an operator, who has made sure that the VM can't run on the
/// other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolution {
    /// The VM runs on this side from now on.
    Here,
    /// The VM is the other side's; what is left of it here is removed.
    There,
}

/// What a machine waits for. Its driver knows how long that may take, and then
/// passes it a `Timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// The other side's next message before the commit: seconds, as the phase
    /// allows.
    Peer,
    /// An answer that the VM's running depends on: ask soon, and again.
    Answer,
    /// A QEMU or a disk that failed just now: try again in a moment.
    Retry,
    /// The other side's message that it needs nothing more: there is no hurry.
    Settled,
}
