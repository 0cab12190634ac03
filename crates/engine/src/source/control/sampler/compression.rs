//! Has lanes compress as hard as pays, by what they deliver.

use std::sync::Arc;
use std::time::Instant;

use api::Compress;
use policy::effort::{Effort, Level, is_enough};

use super::window::{Counts, Window};
use crate::source::lanes::Lanes;

pub(crate) struct Compression {
    lanes: Arc<Lanes>,
    compress: Compress,
    effort: Effort,
    /// What was counted when the effort was last judged, and when.
    judged: (Counts, Instant),
}

impl Compression {
    pub(crate) fn new(lanes: &Arc<Lanes>, compress: Compress) -> Self {
        Self {
            lanes: Arc::clone(lanes),
            compress,
            effort: Effort::new(Level::Hard),
            judged: (Counts::default(), Instant::now()),
        }
    }

    /// `counts` is what they have done until `now`.
    pub(crate) fn decide(&mut self, counts: &Counts, now: Instant) {
        if self.compress != Compress::Auto {
            return;
        }
        let (before, since) = &self.judged;
        let window = Window::between(before, counts, now - *since);
        if is_enough(window.bodies + window.blocks, window.elapsed) {
            self.judged = (counts.clone(), now);
            self.effort = self.effort.next(window.effort);
            self.lanes.set_encoding(self.effort.level().into());
        }
    }
}
