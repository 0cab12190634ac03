//! How a run has ended.

use crate::repeat::{UNSTEADY_MAX, Unsteady};
use crate::run::Done;

/// How all jobs ended.
pub(crate) struct Outcome {
    pub(crate) done: Vec<Done>,
    pub(crate) unsteady: Vec<Unsteady>,
    /// Unsteady tests of this run, with those of its earlier parts.
    pub(crate) unsteady_in_all: usize,
}

impl Outcome {
    pub(crate) fn failed(&self) -> impl Iterator<Item = &Done> {
        self.done.iter().filter(|one| one.verdict.wrong.is_some())
    }

    pub(crate) fn passed(&self) -> bool {
        self.failed().next().is_none() && self.unsteady_in_all <= UNSTEADY_MAX
    }
}
