//! The phases of one migration at its source. Each is a type that owns the
//! migration's state at that point and becomes the next phase; a phase that fails is
//! handed back, to be undone.
//!
//! ```text
//! Context -> Connected -> Ordered -> Prepared -> Journaled<Prepared>
//!     -> Journaled<Streaming> -> Delivered -> Loaded -> (committed) -> Ended
//! ```

mod commit;
pub(crate) mod connect;
mod deliver;
mod description;
mod effects;
mod journaled;
pub(crate) mod listening;
mod load;
pub(crate) mod prepare;
mod release;
mod standstill;
pub(crate) mod start;
mod stream;
mod undo;

use api::Outcome;

use super::Settlement;
use crate::error::MigrationError;

/// A migration that has ended at the source, with everything released.
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) settlement: Settlement,
}

/// Undoes a phase: before the commit the VM always goes on here.
pub(crate) trait Undo {
    /// Undoes it and returns the outcome.
    fn undo(self: Box<Self>, error: &MigrationError) -> Ended;
}

/// A phase that failed, and the reason.
pub(crate) struct Failed<'m> {
    pub(crate) phase: Box<dyn Undo + 'm>,
    pub(crate) error: MigrationError,
}

impl<'m> Failed<'m> {
    pub(crate) fn new(phase: impl Undo + 'm, error: MigrationError) -> Self {
        Self { phase: Box::new(phase), error }
    }
}
