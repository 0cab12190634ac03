//! Loads the VM after everything was delivered: disks are flushed, lanes end, QEMU loads.
//!
//! Each of these can hang: unresponsive storage, memory whose pages come from such storage, a QEMU
//! that is stuck. So a separate thread waits for them, while the leading thread listens to the
//! source.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, after, bounded, select};
use placer::Feeder;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use wire::ToDestination;

use super::connect::{Connected, SILENCE};
use super::effects::Loaded;
use super::end::{End, ended};
use super::prepare::Prepared;
use super::prove::Proved;
use crate::destination::disks::ArrivingDisks;
use crate::destination::lanes::ArrivingLanes;
use crate::destination::nic_use::NicReports;
use crate::link::Received;
use crate::tail::Tail;

/// When a QEMU that hung has ended, the thread that waited for it returns at once.
const BACK_MAX: Duration = Duration::from_secs(2);

/// The work after everything was delivered.
struct Loading {
    nic_reports: NicReports,
    disks: Option<Arc<ArrivingDisks>>,
    lanes: Arc<ArrivingLanes>,
    incoming: Arc<Incoming>,
    feeder: Arc<Feeder>,
    tail: Tail,
    /// Whether the tail is the whole stream.
    is_whole: bool,
    /// The time limit for QEMU's load.
    wait: Duration,
}

impl Loading {
    fn run(self) -> Result<(), End> {
        let Self { nic_reports, disks, lanes, incoming, feeder, tail, is_whole, wait } = self;
        drop(nic_reports);
        if let Some(disks) = &disks {
            disks.finish().map_err(End::failed)?;
        }
        lanes.end();
        let fed = if is_whole { feeder.whole(tail.bytes()) } else { feeder.tail(tail.bytes()) };
        fed.map_err(|error| End::failed(incoming.explain(&error)))?;
        drop(tail);
        feeder.finish().map_err(|error| End::failed(incoming.explain(&error)))?;
        incoming.wait_loaded(wait).map_err(End::failed)
    }
}

impl Proved<'_, '_> {
    /// Makes QEMU load the VM.
    pub(super) fn load(self) -> Result<Loaded, End> {
        let Self { tail, cost, prepared } = self;
        let Prepared { connected, machine, nic_reports, disks, feeder, incoming, .. } = prepared;
        let is_whole = prepared.maps_ram;
        let (lanes, wait) = (Arc::clone(&connected.lanes), connected.shared.local.waits.load);
        let loading = Loading {
            nic_reports,
            disks,
            lanes,
            incoming: Arc::clone(&incoming),
            feeder,
            tail,
            is_whole,
            wait,
        };
        connected.load(machine, loading)?;
        Ok(Loaded { incoming, cost, ran: None })
    }
}

impl Connected<'_> {
    /// Makes QEMU load the VM. Meanwhile the only expected message is the source's end of the
    /// migration, which ends whatever hangs here, as far as possible.
    fn load(&self, machine: &Machine, loading: Loading) -> Result<(), End> {
        let late = after(SILENCE * loading.wait);
        let (feeder, disks) = (Arc::clone(&loading.feeder), loading.disks.clone());
        let (tell, done) = bounded(1);
        data_threads::spawn("arrival-load", move || {
            // If this thread was left behind, the receiver is dropped.
            let _ = tell.send(loading.run());
        })
        .map_err(End::failed)?;
        let end = loop {
            let received = select! {
                recv(done) -> loaded => {
                    return loaded.unwrap_or_else(|_| Err(End::failed("a fault in the agent")));
                }
                recv(self.inbox) -> received => received,
                recv(self.broken) -> why => {
                    break End::failed(why.unwrap_or_else(|_| "a lane failed".to_owned()));
                }
                recv(late) -> _ => break End::failed("its QEMU here does not load it"),
            };
            match received {
                // All data is here and flushed, so no thread is left that these concern. A flush
                // that was requested while the VM ran may arrive late.
                Ok(Received::Message(
                    ToDestination::Terms(_)
                    | ToDestination::FlushDisk { .. }
                    | ToDestination::Spare { .. },
                )) => {}
                Ok(received) => break ended(received),
                Err(_) => break End::Over("the source's connection has ended".to_owned()),
            }
        };
        self.stop_loading(machine, &feeder, disks.as_deref(), &done);
        Err(end)
    }

    /// Ends what the other thread waits for, because the VM doesn't arrive.
    fn stop_loading(
        &self,
        machine: &Machine,
        feeder: &Feeder,
        disks: Option<&ArrivingDisks>,
        done: &Receiver<Result<(), End>>,
    ) {
        feeder.stop();
        self.lanes.shut();
        if let Some(disks) = disks {
            disks.shut();
        }
        if let Err(error) = machine.quit() {
            tracing::warn!(%error, "the QEMU that loads the VM can't be ended");
        }
        if done.recv_timeout(BACK_MAX).is_err() {
            tracing::error!(
                pid = machine.process.pid(),
                "a thread waits for storage, or a QEMU, that doesn't answer: it stays until it does"
            );
        }
    }
}
