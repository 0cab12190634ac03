//! Measures a domain's migration, and shows its progress. xl decides by itself when it suspends the
//! domain, so nothing else follows.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_channel::never;

use super::passes::{Seen, XlPasses};
use crate::source::control::sampler::ticking::{self, Ticking};
use crate::source::control::sampler::{Sampler, Shown};

/// The sampler of a domain.
pub(super) struct ByXl {
    pub(super) sampler: Sampler,
    pub(super) passes: Arc<XlPasses>,
}

impl ByXl {
    /// Starts it.
    pub(super) fn start(mut self) -> std::io::Result<Ticking> {
        Ticking::start(self.sampler.lanes.guard(), never(), move || {
            self.sample();
            ticking::USUAL
        })
    }

    fn sample(&mut self) {
        let Self { sampler, passes } = self;
        let Some(window) = sampler.look() else { return };
        let Seen { pass, dirty_bytes_per_s, .. } = passes.seen();
        let (bodies, fills) = sampler.state.taken();
        let ram_bytes = sampler.state.ram_bytes();
        if pass > 1 || ram_bytes > 0 && bodies + fills >= ram_bytes {
            sampler.end_first_pass();
        }
        let pending_bytes = if sampler.state.first_pass_over.load(Relaxed) {
            0
        } else {
            ram_bytes.saturating_sub(bodies + fills)
        };
        let left_bytes = pending_bytes + sampler.delivered().backlog_bytes;
        sampler.report_builder.update(|report| report.passes = pass);
        let (share, time_left_s, held) = (1.0, None, false);
        let shown =
            Shown { pass, ram_bytes, left_bytes, dirty_bytes_per_s, share, time_left_s, held };
        sampler.show(&window, &shown);
    }
}
