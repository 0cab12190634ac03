//! The path of a page at the source: from the tap's socket to the lanes.
//!
//! It sends QEMU no command and needs no journal, so it can also carry a migration that
//! another program commands.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use audit::HandedOver;
use crossbeam_channel::Sender;
use data_threads::DataThreads;
use dedup::source::{Naming, Stage};
use qemu::ram_blocks::RamBlocks;
use tap::{Tap, TapError};
use transport::LanesPlan;
use wire::{Late, ToDestination, ToSource};

use super::collector::Collector;
use super::context::{local, no_thread};
use super::control::pacing::Pacing;
use super::control::stream_state::StreamState;
use super::lanes::{self, Lanes};
use super::notice::Notice;
use super::prefault::Prefault;
use crate::error::MigrationError;
use crate::link::Link;
use crate::network::Network;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;

/// Reads a stream whose pages take the path.
pub(crate) trait Tapping {
    /// Ends it.
    type Stopper: Stopping;

    /// What ends it.
    fn stopper(&self) -> Self::Stopper;
}

/// Ends the threads that read a stream: see [`tap::Stopper`].
pub(crate) trait Stopping {
    /// Hands nothing on any more.
    fn stop(&self);
    /// Ends them, and waits for them.
    fn cut(&self);
    /// Fails a migration that this agent can't cancel.
    fn hang_up(&self, limit: Duration);
    /// CPU time of those that have ended.
    fn cpu(&self) -> Duration;
}

impl Tapping for Tap {
    type Stopper = tap::Stopper;

    fn stopper(&self) -> tap::Stopper {
        self.stopper()
    }
}

impl Stopping for tap::Stopper {
    fn stop(&self) {
        self.stop();
    }

    fn cut(&self) {
        self.cut();
    }

    fn hang_up(&self, limit: Duration) {
        self.hang_up(limit);
    }

    fn cpu(&self) -> Duration {
        self.cpu()
    }
}

/// The path of pages, from its start to the end of the migration.
pub(crate) struct Flow<S = tap::Stopper> {
    pub(crate) state: Arc<StreamState>,
    pub(crate) lanes: Arc<Lanes>,
    /// None: pages don't go by name.
    pub(crate) stage: Option<Arc<Stage>>,
    pub(crate) tap: S,
    pub(crate) threads: Arc<DataThreads>,
    /// Paces the lanes, and the stream if it is passed through whole.
    pub(crate) pacing: Pacing,
    /// None: no hole is filled, or no more.
    prefault: Option<Prefault>,
    /// CPU time of threads that have ended, without the tap's.
    cpu: Duration,
    notices: Sender<Notice>,
    pub(crate) report_builder: Arc<ReportBuilder>,
}

/// The parts of a flow.
pub(crate) struct FlowPlan<'p> {
    pub(crate) state: Arc<StreamState>,
    pub(crate) lanes: LanesPlan,
    /// None: pages don't go by name.
    pub(crate) naming: Option<Arc<Naming>>,
    pub(crate) handed_over: &'p Arc<HandedOver>,
    pub(crate) link: &'p Arc<Link<ToDestination>>,
    pub(crate) network: &'p Arc<Network>,
    pub(crate) notices: &'p Sender<Notice>,
    pub(crate) threads: &'p Arc<DataThreads>,
    pub(crate) report_builder: &'p Arc<ReportBuilder>,
}

/// Why a tap has failed. One whose batch was refused doesn't know the reason, which the lanes do.
pub(crate) fn tap_failed(error: TapError, lanes: &Lanes, host: String) -> MigrationError {
    match lanes.failure() {
        Some(source) => MigrationError::Lanes { host, source },
        None => MigrationError::Tap(error),
    }
}

impl<S: Stopping> Flow<S> {
    /// Starts the lanes, their pacing, and the tap that `open` makes for a collector. The
    /// returned tap is to be joined.
    pub(crate) fn start<T: Tapping<Stopper = S>>(
        plan: FlowPlan<'_>,
        open: impl FnOnce(Collector) -> Result<T, MigrationError>,
    ) -> Result<(Self, T), MigrationError> {
        let FlowPlan { state, naming, link, .. } = plan;
        let (threads, report_builder) = (Arc::clone(plan.threads), Arc::clone(plan.report_builder));
        let lanes = Arc::new(Lanes::new(plan.lanes, Some(Arc::clone(&threads))));
        let stage = |naming| Arc::new(Stage::new(Arc::clone(naming), Arc::clone(lanes.queue())));
        let stage = naming.as_ref().map(stage);
        lanes::start(&lanes, stage.as_ref(), link)
            .map_err(|error| local("starting the lanes' threads", error))?;
        let asks = naming.as_ref().is_some_and(|naming| naming.queries());
        state.set_paths(lanes.paths());
        state.set_useful_bytes(lanes.useful_bytes(asks));
        state.adjust_pool();
        let pacing = Pacing::start(
            Arc::clone(&lanes),
            plan.network,
            Arc::clone(&threads),
            Arc::clone(&report_builder),
            Some(Arc::clone(&state)),
        )
        .map_err(no_thread)?;
        let tap = open(Collector {
            state: Arc::clone(&state),
            lanes: Arc::clone(&lanes),
            link: Arc::clone(link),
            handed_over: Arc::clone(plan.handed_over),
            naming,
            threads: Arc::clone(&threads),
            notices: plan.notices.clone(),
        })?;
        let flow = Self {
            state,
            lanes,
            stage,
            tap: tap.stopper(),
            threads,
            pacing,
            prefault: None,
            cpu: Duration::ZERO,
            notices: plan.notices.clone(),
            report_builder,
        };
        Ok((flow, tap))
    }

    /// Allocates holes of shared RAM ahead of QEMU, unless the guest may report free pages.
    pub(crate) fn prefault(&mut self, hints_free_pages: bool, ram: &RamBlocks) {
        let Self { state, threads, report_builder, .. } = self;
        self.prefault = Prefault::start(hints_free_pages, ram, state, threads, report_builder);
    }

    /// Allocates no more of them.
    pub(crate) fn end_prefault(&mut self) {
        self.cpu += self.prefault.take().map_or(Duration::ZERO, Prefault::stop);
    }

    /// Handles a message of the destination that concerns the flow; returns others.
    pub(crate) fn receive(&self, message: ToSource) -> Option<ToSource> {
        match message {
            ToSource::NicUse(used) => self.pacing.receive(used),
            ToSource::Placement { mapped, inline } => self.note_placement(&mapped, &inline),
            ToSource::Late { batches } => {
                if let Some(stage) = &self.stage {
                    for Late { ticket, requested, more } in batches {
                        stage.late(ticket, requested, more);
                    }
                }
            }
            message => return Some(message),
        }
        None
    }

    /// The destination writes pages of the `mapped` blocks into QEMU's memory.
    fn note_placement(&self, mapped: &[String], inline: &[String]) {
        let how = if mapped.is_empty() { "inline" } else { "mapped" };
        tracing::debug!(?mapped, ?inline, "placement");
        if let Some(deltas) = self.lanes.deltas() {
            deltas.take_for(mapped);
        }
        self.report_builder.update(|report| report.placement = how.to_owned());
    }

    /// Does on a thread of its own what the migration depends on.
    pub(crate) fn in_background(
        &self,
        name: &str,
        work: impl FnOnce(&Lanes) + Send + 'static,
    ) -> Result<(), MigrationError> {
        let lanes = Arc::clone(&self.lanes);
        let guard = lanes.guard();
        let thread = data_threads::spawn(name, move || {
            let _guard = guard;
            work(&lanes);
        });
        thread.map(drop).map_err(no_thread)
    }

    /// The barrier: waits on a thread of its own for `read`, which returns when QEMU has handed
    /// over all of its pages, and then until they are placed.
    pub(crate) fn wait_in_background(
        &self,
        host: String,
        read: impl FnOnce(&Lanes) -> Result<(), MigrationError> + Send + 'static,
    ) -> Result<(), MigrationError> {
        let (stage, notices) = (self.stage.clone(), self.notices.clone());
        self.in_background("barrier", move |lanes| {
            let placed = read(lanes).and_then(|()| {
                if let Some(stage) = stage {
                    // The VM stands still.
                    stage.end_naming();
                }
                let placed = lanes.wait_drained();
                placed.map_err(|source| MigrationError::Lanes { host, source })?;
                // The destination ends the lanes when it loads, which must not count as a
                // failure.
                lanes.close();
                Ok(())
            });
            let _ = notices.send(Notice::Placed(placed));
        })
    }

    /// Reports the figures, once the flow has ended.
    pub(crate) fn account(&self, pools: &Pools, control_bytes: u64) {
        let Self { state, lanes, stage, tap, cpu, .. } = self;
        let (delivered, (body_bytes, fill_bytes)) = (lanes.delivered(), state.taken());
        self.report_builder.update(|report| {
            report.ram_bytes = state.ram_bytes().max(report.ram_bytes);
            report.body_bytes = body_bytes;
            report.fill_bytes = fill_bytes;
            report.dropped_bytes = delivered.dropped_bytes;
            report.delta_bytes = lanes.delta_bytes();
            report.named_bytes = delivered.found_bytes;
            let by_name = stage.as_ref().map(|stage| stage.naming());
            report.named_before_bytes = by_name.map_or(0, Naming::named_before_bytes);
            report.residue_bytes = state.residue_bytes.load(Relaxed);
            lanes::account(lanes, pools, control_bytes, *cpu + tap.cpu(), report);
        });
    }

    /// Ends the flow of a migration that this agent can't cancel: see [`tap::Stopper::hang_up`].
    pub(crate) fn hang_up(&self, limit: Duration) {
        self.lanes.shut();
        self.state.whole.end_pace();
        self.tap.hang_up(limit);
    }

    /// Stops waiting for the destination: closes the lanes, and discards what QEMU
    /// still writes.
    pub(crate) fn let_go(&self) {
        self.state.end_chase();
        self.tap.stop();
        self.state.whole.end_pace();
        self.lanes.shut();
    }

    /// Ends the flow. With `in_order` everything was delivered; otherwise what QEMU still writes
    /// is discarded.
    pub(crate) fn stop(&mut self, in_order: bool) {
        self.cpu += if in_order {
            self.tap.cut();
            self.lanes.finish()
        } else {
            self.tap.stop();
            self.state.whole.end_pace();
            self.lanes.stop()
        };
    }

    /// Bytes received from QEMU or sent to the destination: while this grows, the
    /// migration makes progress.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let come = self.lanes.delivered();
        let memory = come.body_bytes + come.found_bytes + come.fill_bytes + come.dropped_bytes;
        let disks = come.block_bytes + come.block_zero_bytes;
        let tapped = self.state.residue_bytes.load(Relaxed) + self.state.taken().0;
        memory + disks + tapped
    }
}
