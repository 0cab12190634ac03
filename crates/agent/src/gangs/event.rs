//! Messages to the thread that leads a gang.

use api::Progress;

use super::flight::MoveEnd;

/// A message to the leading thread.
pub(super) enum Event {
    /// The progress of a VM's migration.
    Progress(usize, Box<Progress>),
    /// The end of a VM's move; none: it was left alone.
    Ended(usize, Option<MoveEnd>),
    /// The operator cancels the gang.
    Cancel,
    /// This agent ends.
    Leave,
}

/// The capacity of the leading thread's queue.
pub(super) const EVENTS_MAX: usize = 256;
