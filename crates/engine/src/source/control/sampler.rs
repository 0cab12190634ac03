//! Twenty times a second, or sooner when something waits: measures, adapts the pool and the
//! encoding, and shows progress.
//!
//! What else follows is decided by QEMU's progress (`by_progress`) or, if another program commands
//! QEMU, by its passes (`carried::by_passes`).

pub(crate) mod compression;
pub(crate) mod deliveries;
pub(crate) mod ticking;
pub(crate) mod window;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use api::{Compress, Phase, Sample};
use dedup::source::Stage;
use transport::Delivered;

use deliveries::Deliveries;
use window::Window;

use super::bandwidth::WireShare;
use super::limit::{PeerShare, Seen};
use super::pacing::pace_bounds;
use super::stream_state::StreamState;
use crate::report_builder::ReportBuilder;
use crate::source::flow::Flow;
use crate::source::lanes::{self, Lanes};

/// What is measured of one migration, whichever program commands QEMU.
pub(crate) struct Sampler {
    pub(crate) state: Arc<StreamState>,
    pub(crate) lanes: Arc<Lanes>,
    /// None: pages don't go by name.
    pub(crate) by_name: Option<Arc<Stage>>,
    pub(crate) report_builder: Arc<ReportBuilder>,
    deliveries: Deliveries,
    peer: PeerShare,
    wire_share: WireShare,
}

/// What is known of QEMU's side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) pass: u32,
    pub(crate) ram_bytes: u64,
    /// What QEMU and the buffers hold. Pages that are in flight and dirty again count twice.
    pub(crate) left_bytes: u64,
    pub(crate) dirty_bytes_per_s: f64,
    /// The share of its CPU time that the VM keeps.
    pub(crate) share: f64,
    /// None if unknown.
    pub(crate) time_left_s: Option<f64>,
    /// QEMU is read more slowly than possible.
    pub(crate) held: bool,
}

impl Sampler {
    pub(crate) fn new<S>(flow: &Flow<S>, compress: Compress) -> Self {
        let Flow { state, lanes, stage, report_builder, .. } = flow;
        Self {
            state: Arc::clone(state),
            lanes: Arc::clone(lanes),
            by_name: stage.clone(),
            report_builder: Arc::clone(report_builder),
            deliveries: Deliveries::new(state, lanes, compress, stage.clone()),
            peer: PeerShare::default(),
            wire_share: WireShare::default(),
        }
    }

    /// Measures. None if no time has passed.
    pub(crate) fn look(&mut self) -> Option<Window> {
        let window = self.deliveries.look()?;
        self.peer.add(window.writing, window.for_peer);
        self.wire_share.add(&window);
        if let (Some(by_name), Some(rate)) = (&self.by_name, self.state.bodies_per_s()) {
            by_name.naming().set_bodies_per_s(rate);
        }
        self.state.adjust_pool();
        Some(window)
    }

    /// Has lanes paced by what the VM needs, in guest bytes per second. None: it never needed more
    /// than it got.
    pub(crate) fn need(&self, bytes_per_s: Option<f64>) {
        if let Some(rate) = bytes_per_s {
            self.state.bandwidth.need(self.wire_share.wire_bytes(rate));
        }
    }

    /// What was delivered by the last look.
    pub(crate) fn delivered(&self) -> &Delivered {
        &self.deliveries.last().delivered
    }

    /// The first pass has ended. Returns whether that is new.
    pub(crate) fn end_first_pass(&self) -> bool {
        if self.state.first_pass_over.swap(true, Relaxed) {
            return false;
        }
        if let Some(by_name) = &self.by_name {
            by_name.end_first_pass();
        }
        self.report_builder.enter(Phase::LaterPass);
        self.state.adjust_pool();
        true
    }

    /// Shows the progress, and decides what lanes note.
    pub(crate) fn show(&self, window: &Window, shown: &Shown) {
        let Shown { pass, ram_bytes, dirty_bytes_per_s, share, time_left_s, .. } = *shown;
        let left_bytes = shown.left_bytes.min(ram_bytes);
        let sample = Sample {
            at_s: self.report_builder.elapsed_s(),
            delivered_bytes_per_s: window.delivered_per_s,
            wire_bytes_per_s: window.wire_per_s,
            dirty_bytes_per_s,
            share,
            left_bytes,
            pool_bytes: self.state.pool.out_bytes() as u64,
            lanes_bytes_per_s: window.lanes_per_s.clone(),
        };
        let seen = self.seen(window, shown);
        let limit = seen.limit();
        lanes::note_pages(&self.lanes, seen.at_source());
        self.report_builder.sample(sample, |progress| {
            progress.pass = pass;
            progress.ram_bytes = ram_bytes;
            progress.left_bytes = left_bytes;
            progress.percent = percent(left_bytes, ram_bytes);
            progress.delivered_bytes_per_s = window.delivered_per_s;
            progress.wire_bytes_per_s = window.wire_per_s;
            progress.dirty_bytes_per_s = dirty_bytes_per_s;
            progress.share = share;
            progress.limit = limit;
            progress.time_left_s = time_left_s;
        });
    }

    fn seen(&self, window: &Window, shown: &Shown) -> Seen {
        let bounds = self.report_builder.watch().bounds();
        Seen {
            later: self.state.first_pass_over.load(Relaxed),
            dirty_bytes_per_s: shown.dirty_bytes_per_s,
            bodies_per_s: self.state.bodies_per_s(),
            lanes: window.effort,
            storage: self.waits_for_storage(),
            peer: self.peer,
            held: shown.held,
            wire_bytes_per_s: window.wire_per_s,
            cap_bytes_per_s: pace_bounds(&bounds).cap_content_bytes_per_s(),
        }
    }

    /// Whether the destination's storage is waited for.
    fn waits_for_storage(&self) -> bool {
        let reads_disks = self.by_name.as_ref().is_some_and(|it| it.naming().reads_disks());
        let delivered = self.delivered();
        delivered.blocks_held > 0 || reads_disks && delivered.awaited_bytes > 0
    }
}

fn percent(left_bytes: u64, total_bytes: u64) -> f64 {
    if total_bytes == 0 {
        return 0.0;
    }
    100.0 * (1.0 - left_bytes.min(total_bytes) as f64 / total_bytes as f64)
}
