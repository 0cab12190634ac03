//! Makes lanes compress as hard as pays, judging by what they deliver.

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
    /// The counters and time when the effort was last judged.
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

    /// Adapts the encoding; `counts` are the lanes' counters at `now`.
    pub(crate) fn decide(&mut self, counts: &Counts, now: Instant) {
        if self.compress != Compress::Auto {
            return;
        }
        let (before, since) = &self.judged;
        let window = Window::between(before, counts, now - *since);
        if is_enough(window.bodies + window.blocks, window.elapsed) {
            self.judged = (counts.clone(), now);
            self.effort = self.effort.next(window.effort);
            tracing::trace!(sample = ?window.effort, level = ?self.effort.level(), "encoding");
            self.lanes.set_encoding(self.effort.level().into());
        }
    }
}
