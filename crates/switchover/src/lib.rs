//! The switchover: how a VM changes hands while exactly one copy of it runs.
//!
//! Both sides of a switchover are state machines without I/O: [`source::Machine`] and
//! [`destination::Machine`] take an `Event` and return `Action`s in order. A [`journal::Journal`]
//! keeps each side's decisions, written before anything acts on them, so that a restarted agent
//! continues where it was. A [`Driver`] joins the two for a blocking thread: it performs the
//! actions in order, and if a record can't be written, the actions after it are not done.
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
//! - Each side repeats its state until the other side's answer ends that; messages may be lost,
//!   repeated and late.
//! - A side removes its journal only when the other side can no longer need it, or an operator says
//!   a second time that it can't run the VM, and answers `unknown` from then on.
//!
//! docs/PROTOCOL.md has the tables. `tests/explorer` visits every reachable state of both, with
//! crashes between any two actions, and checks that no state runs the VM twice and none loses it.

#![forbid(unsafe_code)]

pub mod destination;
mod doubt;
mod driver;
#[doc(hidden)]
pub mod fuzzing;
pub mod journal;
mod kept;
mod message;
mod migration_id;
mod reason;
pub mod source;

pub use doubt::Doubt;
pub use driver::{Driver, Machine, Performs};
pub use kept::Kept;
pub use message::{Envelope, ToDestination, ToSource};
pub use migration_id::{MigrationId, NotAnId};
pub use reason::Reason;

use serde::{Deserialize, Serialize};

/// The state of a VM's QEMU that an agent finds when it reads a journal after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// There is none: it ended, or its host has been booted since.
    Missing,
    /// It holds the VM and does not run it: at the source as its migration left
    /// it (`finish-migrate`, `postmigrate`), at the destination `inmigrate` or
    /// `paused`.
    Stopped,
    /// It runs the VM; at the source, the VM may also be paused by its owner.
    Runs,
}

/// The decision of an operator, who has made sure that the VM can't run on the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolution {
    /// The VM runs on this side from now on.
    Here,
    /// The VM is the other side's; what is left of it here is removed.
    There,
}

/// What a machine waits for. Its driver knows how long that may take, and then sends it a
/// `Timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// The other side's next message before the commit: seconds, depending on the phase.
    Peer,
    /// An answer on which the VM's running depends: ask soon, and repeatedly.
    Answer,
    /// A QEMU or a disk that has just failed: try again in a moment.
    Retry,
    /// The other side's message that it needs nothing more: this is not urgent.
    Settled,
}
