//! Decides by QEMU's passes, after each sample: how far the VM is throttled, and how long the
//! permission to stop it is held back.
//!
//! QEMU is not queried. Its remainder is the part of its first pass that it has not handed
//! over yet, or an estimate from its passes, plus the data in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crossbeam_channel::never;

use super::convergence::{Come, Convergence, Flowing};
use super::passes::Passes;
use super::waiting::{Left, Waiting};
use super::way_back::WayBack;
use crate::source::control::sampler::Sampler;
use crate::source::control::sampler::ticking::{self, Ticking};
use crate::source::control::sampler::window::Window;

/// The fraction of RAM handed over when the first pass is about to end.
const NEAR_END: f64 = 0.9;

/// What follows from the passes.
pub(super) struct ByPasses {
    pub(super) sampler: Sampler,
    pub(super) convergence: Convergence,
    pub(super) passes: Arc<Passes>,
    pub(super) way_back: Arc<WayBack>,
    /// The part of the downtime that is needed without any pages.
    pub(super) fixed: Duration,
    pub(super) waiting: Waiting,
}

/// However sampling ends, QEMU must not wait for a permission that never comes.
impl Drop for ByPasses {
    fn drop(&mut self) {
        self.way_back.let_stop();
    }
}

impl ByPasses {
    /// Starts the sampler. Its end also ends throttling.
    pub(super) fn start(mut self) -> std::io::Result<Ticking> {
        Ticking::start(self.sampler.lanes.guard(), never(), move || {
            self.sample();
            self.next()
        })
    }

    fn sample(&mut self) {
        let Some(window) = self.sampler.look() else { return };
        self.look_for_first_pass();
        let come = self.converge();
        self.keep_waiting(&come, &window);
        self.sampler.report_builder.update(|report| report.passes = come.shown.pass);
        self.sampler.show(&window, &come.shown);
    }

    /// Detects the end of the first pass, in which each page comes once. With a balloon
    /// some pages don't come at all.
    fn look_for_first_pass(&self) {
        let ram_bytes = self.sampler.state.ram_bytes();
        if ram_bytes > 0 && self.handed_over() >= ram_bytes || self.convergence.is_later() {
            self.sampler.end_first_pass();
        }
    }

    fn handed_over(&self) -> u64 {
        let (bodies, fills) = self.sampler.state.taken();
        bodies + fills
    }

    fn converge(&mut self) -> Come {
        let handed_over = self.handed_over();
        let Sampler { state, .. } = &self.sampler;
        let ram_bytes = state.ram_bytes();
        let flowing = Flowing {
            ram_bytes,
            pending_bytes: ram_bytes.saturating_sub(handed_over),
            backlog_bytes: self.sampler.delivered().backlog_bytes,
            bodies_per_s: state.bodies_per_s(),
            first_pass_over: state.first_pass_over.load(Relaxed),
            wider: state.bandwidth.is_wider(),
        };
        let come = self.convergence.look(&flowing);
        self.sampler.need(come.needed_bytes_per_s);
        come
    }

    /// Keeps QEMU waiting for the permission until what is left fits the downtime goal.
    fn keep_waiting(&mut self, come: &Come, window: &Window) {
        let Self { sampler, way_back, passes, fixed, waiting, .. } = self;
        let Sampler { state, report_builder, .. } = &*sampler;
        if !way_back.is_kept() || !state.first_pass_over.load(Relaxed) {
            return;
        }
        let delivered = sampler.delivered();
        let Some(to_come) = waiting.dirty(passes.sweeps(), come.to_come) else { return };
        if delivered.awaited_bytes > 0 {
            // The VM would be stopped while the destination waits for that content.
            return;
        }
        let left = Left {
            bytes: delivered.backlog_bytes.saturating_add(to_come.whole_bytes()),
            pass: to_come.pass,
            fixed: *fixed,
            helped: come.helped,
            elapsed: window.elapsed,
            wire_bytes_per_s: window.wire_per_s,
        };
        if waiting.is_over(state, left) && way_back.let_stop() {
            report_builder.note(format!(
                "QEMU waited {:.1} s after its first pass until it was allowed to stop the VM",
                waiting.time().as_secs_f64()
            ));
        }
    }

    fn next(&mut self) -> Duration {
        if !self.way_back.is_kept() {
            return ticking::USUAL;
        }
        let ram_bytes = self.sampler.state.ram_bytes() as f64;
        if (self.handed_over() as f64) < ram_bytes * NEAR_END {
            return ticking::USUAL;
        }
        self.waiting.next()
    }
}
