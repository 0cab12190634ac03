//! What the thread that leads a gang hears.

use api::Progress;

use super::flight::End;

/// What the thread that leads is told.
pub(super) enum Event {
    /// A VM's migration goes on.
    Progress(usize, Box<Progress>),
    /// It has ended; none: it was left alone.
    Ended(usize, Option<End>),
    /// The operator wants no more of it.
    Cancel,
    /// This agent ends.
    Leave,
}

/// What may be said of one VM before the others are heard.
pub(super) const EVENTS_MAX: usize = 256;
