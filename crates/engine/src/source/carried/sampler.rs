//! Twenty times a second: shows progress, and decides how much may be in flight, how bodies
//! are encoded, how far the VM is throttled, and how long the permission to stop it is held
//! back.
//!
//! QEMU is not queried. Its remainder is the part of its first pass that it has not handed
//! over yet, or an estimate from its passes, plus the data in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use api::{Compress, Phase, Sample};
use crossbeam_channel::never;
use dedup::source::Stage;

use super::convergence::{Come, Convergence, Flowing};
use super::passes::Passes;
use super::waiting::{Left, Waiting};
use super::way_back::WayBack;
use crate::report_builder::ReportBuilder;
use crate::source::control::limit::{PeerShare, Seen};
use crate::source::control::pacing::pace_bounds;
use crate::source::control::sampler::deliveries::Deliveries;
use crate::source::control::sampler::not_there;
use crate::source::control::sampler::ticking::{self, Ticking};
use crate::source::control::sampler::window::Window;
use crate::source::control::stream_state::StreamState;
use crate::source::lanes::{self, Lanes};

/// The fraction of RAM handed over when the first pass is about to end.
const NEAR_END: f64 = 0.9;

pub(super) struct Watched {
    pub(super) state: Arc<StreamState>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) stage: Option<Arc<Stage>>,
    pub(super) report_builder: Arc<ReportBuilder>,
    pub(super) compress: Compress,
    pub(super) convergence: Convergence,
    pub(super) passes: Arc<Passes>,
    pub(super) way_back: Arc<WayBack>,
    /// The part of the downtime that is needed without any pages.
    pub(super) fixed: Duration,
}

/// Starts the sampler. Its end also ends throttling.
pub(super) fn start(watched: Watched) -> std::io::Result<Ticking> {
    let Watched { state, lanes, compress, stage, .. } = &watched;
    let guard = lanes.guard();
    let deliveries = Deliveries::new(state, lanes, *compress, stage.clone());
    let (waiting, peer) = (Waiting::default(), PeerShare::default());
    let mut sampling = Sampling { watched, deliveries, waiting, peer };
    Ticking::start(guard, never(), move || {
        sampling.sample();
        sampling.next()
    })
}

struct Sampling {
    watched: Watched,
    deliveries: Deliveries,
    waiting: Waiting,
    peer: PeerShare,
}

/// However sampling ends, QEMU must not wait for a permission that never comes.
impl Drop for Sampling {
    fn drop(&mut self) {
        self.watched.way_back.let_stop();
    }
}

impl Sampling {
    fn sample(&mut self) {
        let Some(window) = self.deliveries.look() else { return };
        self.peer.add(window.writing, window.for_peer);
        self.look_for_first_pass();
        let Watched { stage, state, .. } = &self.watched;
        if let (Some(stage), Some(rate)) = (stage, state.bodies_per_s()) {
            stage.naming().set_bodies_per_s(rate);
        }
        self.watched.state.adjust_pool();
        let come = self.converge();
        self.keep_waiting(&come, &window);
        self.show(&window, &come);
    }

    /// Detects the end of the first pass, in which each page comes once. With a balloon
    /// some pages don't come at all.
    fn look_for_first_pass(&self) {
        let Watched { state, report_builder, convergence, stage, .. } = &self.watched;
        let ram_bytes = state.ram_bytes();
        let is_over = ram_bytes > 0 && self.handed_over() >= ram_bytes || convergence.is_later();
        if is_over && !state.first_pass_over.swap(true, Relaxed) {
            if let Some(stage) = stage {
                stage.end_first_pass();
            }
            report_builder.enter(Phase::LaterPass);
        }
    }

    fn handed_over(&self) -> u64 {
        let (bodies, fills) = self.watched.state.taken();
        bodies + fills
    }

    fn converge(&mut self) -> Come {
        let handed_over = self.handed_over();
        let state = &self.watched.state;
        let ram_bytes = state.ram_bytes();
        let flowing = Flowing {
            ram_bytes,
            pending_bytes: ram_bytes.saturating_sub(handed_over),
            backlog_bytes: self.deliveries.last().delivered.backlog_bytes,
            bodies_per_s: state.bodies_per_s(),
            first_pass_over: state.first_pass_over.load(Relaxed),
        };
        self.watched.convergence.look(&flowing)
    }

    /// Keeps QEMU waiting for the permission until what is left fits the downtime goal.
    fn keep_waiting(&mut self, come: &Come, window: &Window) {
        let Watched { state, way_back, passes, fixed, report_builder, .. } = &self.watched;
        if !way_back.is_kept() || !state.first_pass_over.load(Relaxed) {
            return;
        }
        let delivered = &self.deliveries.last().delivered;
        let Some(to_come) = self.waiting.dirty(passes.sweeps(), come.to_come) else { return };
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
        if self.waiting.is_over(state, left) && way_back.let_stop() {
            report_builder.note(format!(
                "QEMU waited {:.1} s after its first pass until it was allowed to stop the VM",
                self.waiting.time().as_secs_f64()
            ));
        }
    }

    fn next(&mut self) -> Duration {
        if !self.watched.way_back.is_kept() {
            return ticking::USUAL;
        }
        let ram_bytes = self.watched.state.ram_bytes() as f64;
        if (self.handed_over() as f64) < ram_bytes * NEAR_END {
            return ticking::USUAL;
        }
        self.waiting.next()
    }

    fn show(&self, window: &Window, come: &Come) {
        let Watched { state, report_builder, .. } = &self.watched;
        let ram_bytes = state.ram_bytes();
        let left_bytes = not_there(come.left_bytes, ram_bytes);
        report_builder.tell(|report| report.passes = come.pass);
        let sample = Sample {
            at_s: report_builder.elapsed_s(),
            delivered_bytes_per_s: window.delivered_per_s,
            wire_bytes_per_s: window.wire_per_s,
            dirty_bytes_per_s: come.dirty_bytes_per_s,
            share: come.share,
            left_bytes,
            pool_bytes: state.pool.out_bytes() as u64,
            lanes_bytes_per_s: window.lanes_per_s.clone(),
        };
        let seen = self.seen(window, come);
        let limit = seen.limit();
        lanes::note_pages(&self.watched.lanes, seen.at_source());
        report_builder.sample(sample, |progress| {
            progress.pass = come.pass;
            progress.ram_bytes = ram_bytes;
            progress.left_bytes = left_bytes;
            let done = ram_bytes.saturating_sub(left_bytes) as f64;
            progress.percent = if ram_bytes > 0 { done / ram_bytes as f64 * 100.0 } else { 0.0 };
            progress.delivered_bytes_per_s = window.delivered_per_s;
            progress.wire_bytes_per_s = window.wire_per_s;
            progress.dirty_bytes_per_s = come.dirty_bytes_per_s;
            progress.share = come.share;
            progress.limit = limit;
            progress.time_left_s = come.time_left.map(|time| time.as_secs_f64());
        });
    }

    fn seen(&self, window: &Window, come: &Come) -> Seen {
        let bounds = self.watched.report_builder.watch().bounds();
        let delivered = &self.deliveries.last().delivered;
        let stage = self.watched.stage.as_ref();
        let reads_disks = stage.is_some_and(|stage| stage.naming().reads_disks());
        Seen {
            later: self.watched.state.first_pass_over.load(Relaxed),
            dirty_bytes_per_s: come.dirty_bytes_per_s,
            bodies_per_s: self.watched.state.bodies_per_s(),
            lanes: window.effort,
            storage: reads_disks && delivered.awaited_bytes > 0,
            peer: self.peer,
            held: false,
            wire_bytes_per_s: window.wire_per_s,
            cap_bytes_per_s: pace_bounds(&bounds).cap_content_bytes_per_s(),
        }
    }
}
