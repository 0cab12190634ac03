//! From delivered pages to a VM that runs at the destination.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::Phase;
use switchover::Envelope;
use switchover::source::{Event as Step, Outcome as Fate};
use transport::Delivered;
use wire::{ToDestination, ToSource};

use crate::error::MigrationError;
use crate::link::Heard;
use crate::source::{Happening, Source};

/// A note on disk there, and what it has cost, after that.
const NOTED_MAX: Duration = Duration::from_secs(5);

impl Source<'_> {
    /// Lets the destination load, and waits until it has.
    pub(crate) fn complete(&mut self) -> Result<Envelope<switchover::ToSource>, MigrationError> {
        let stream = self.stream.as_ref().expect("a stream was delivered");
        let residue_bytes = stream.state.residue_bytes.load(Relaxed);
        self.blackout.loads();
        let totals = self.audit_totals();
        self.send(&ToDestination::Complete { residue_bytes, audit: totals.clone() })?;
        let until = Instant::now() + self.local.waits.load;
        loop {
            match self.next(until)? {
                Happening::Said(said) if said.message == switchover::ToSource::Loaded => {
                    if !self.is_audited(&totals) {
                        return Err(self.said_early(&said));
                    }
                    self.report_builder.enter(Phase::Loaded);
                    return Ok(said);
                }
                Happening::Said(said) => return Err(self.said_early(&said)),
                Happening::Peer(ToSource::Placement { mapped, inline }) => {
                    self.note_placement(&mapped, &inline);
                }
                Happening::Peer(other) => match self.audit(&other) {
                    Some(outcome) => outcome?,
                    None => return Err(self.unexpected(&other)),
                },
                Happening::Qemu(event) => self.follow(&event)?,
                Happening::Notice(_) | Happening::Late => {}
            }
        }
    }

    /// Whether all went well with the lanes, whatever came of it.
    pub(crate) fn check_lanes(&self) -> Result<(), MigrationError> {
        match self.stream.as_ref().and_then(|stream| stream.lanes.failure()) {
            Some(source) => Err(MigrationError::Lanes { host: self.peer.name.clone(), source }),
            None => Ok(()),
        }
    }

    /// Gives the VM up, and waits until it runs there.
    pub(crate) fn commit(
        &mut self,
        loaded: Envelope<switchover::ToSource>,
    ) -> Result<(), MigrationError> {
        self.step(Step::Heard(loaded));
        let until = Instant::now() + self.local.waits.run;
        while self.fate.is_none() && self.doubt.is_none() {
            match self.next(until) {
                Ok(Happening::Said(said)) => {
                    if said.message == switchover::ToSource::Running {
                        self.running();
                    }
                    self.step(Step::Heard(said));
                }
                Ok(_) => {}
                // Nobody else resumes it here, and the destination's copy is as
                // good.
                Err(MigrationError::VmGone(_)) => {
                    self.qemu_events = crossbeam_channel::never();
                    self.step(Step::QemuGone);
                }
                Err(error) if Instant::now() < until => {
                    self.step(Step::ConnectionLost { reason: error.to_string().into() });
                    self.step(Step::Timeout);
                    break;
                }
                Err(_) => {
                    self.step(Step::Timeout);
                    break;
                }
            }
        }
        self.concluded()
    }

    /// What the switchover has come to.
    fn concluded(&mut self) -> Result<(), MigrationError> {
        match (&self.fate, &self.doubt) {
            (Some(Fate::Gone), _) => {
                self.wait_noted();
                Ok(())
            }
            (Some(Fate::Stays { reason }), _) if self.committed => {
                let (host, reason) = (self.peer.name.clone(), reason.to_string());
                Err(MigrationError::DestinationFailed { host, reason })
            }
            (Some(Fate::Stays { reason }), _) => Err(MigrationError::Qemu(reason.to_string())),
            (Some(Fate::Lost { reason }), _) => Err(MigrationError::VmGone(reason.to_string())),
            (None, Some(doubt)) => {
                Err(MigrationError::InDoubt(doubt.advice(&self.vm.name, &self.peer.name)))
            }
            (None, None) => Err(MigrationError::InDoubt(format!(
                "{} runs at {}; its QEMU here does not end, and that is tried again",
                self.vm.name, self.peer.name
            ))),
        }
    }

    fn running(&mut self) {
        self.report_builder.enter(Phase::Running);
        let at = self.stopped.as_ref().map(|stop| stop.at).or_else(|| self.stops.last());
        let Some(gone) = at.map(|at| at.elapsed()) else { return };
        if let Some(stop) = &self.stopped {
            let now = self.delivered();
            let moving = now.busy.saturating_sub(stop.delivered.busy);
            self.local.fixed_cost.learn(gone.saturating_sub(moving));
            let bytes = now.body_bytes - stop.delivered.body_bytes;
            self.report_builder.tell(|report| report.stopped_bytes = bytes);
        }
        self.report_builder.tell(|report| report.downtime_ms = Some(gone.as_secs_f64() * 1e3));
    }

    pub(crate) fn delivered(&self) -> Delivered {
        self.stream.as_ref().map(|stream| stream.lanes.delivered()).unwrap_or_default()
    }

    /// The destination hangs up once it has noted that the VM is its own: who
    /// is told that the migration is over finds the VM there, free to move on.
    fn wait_noted(&self) {
        let Some(control) = &self.control else { return };
        let until = Instant::now() + NOTED_MAX;
        while let Ok(heard) = control.hear.recv_deadline(until) {
            match heard {
                Heard::Gone(_) => return,
                Heard::Message(ToSource::Cost {
                    cpu_s,
                    pool_high_water_bytes,
                    peer_bytes,
                    again_bytes,
                    stored_bytes,
                    storage_read_bytes,
                    ran_ms,
                }) => {
                    self.report_builder.tell(|report| {
                        report.peer_bytes = peer_bytes;
                        report.again_bytes = again_bytes;
                        report.stored_bytes = stored_bytes;
                        report.storage_read_bytes = storage_read_bytes;
                        report.cpu_destination_s = cpu_s;
                        report.pool_high_water_bytes[1] = pool_high_water_bytes;
                        // It ran before we heard so.
                        let ran_ms = ran_ms.max(0.0);
                        report.downtime_ms = report.downtime_ms.map(|ms| (ms - ran_ms).max(0.0));
                    });
                }
                _ => {}
            }
        }
    }
}
