//! The way back: whatever happened before the commit, the VM goes on here.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::{LaneReport, Outcome};
use crossbeam_channel::RecvTimeoutError;
use qemu::qmp::QmpError;
use switchover::source::{Event as Step, Outcome as Fate};
use wire::ToDestination;

use crate::error::MigrationError;
use crate::source::Source;

/// What QEMU says last comes by another socket than its stream, a moment later on
/// a busy host.
const LAST_WORD: Duration = Duration::from_millis(500);
/// What a destination that reads has taken by then. The VM may stand still meanwhile.
const SAID_MAX: Duration = Duration::from_millis(20);

impl Source<'_> {
    /// Why the stream can't be read: if its QEMU ends, that is the reason.
    pub(crate) fn behind(&mut self, error: MigrationError) -> MigrationError {
        if !matches!(error, MigrationError::Tap(_)) {
            return error;
        }
        let until = Instant::now() + LAST_WORD;
        loop {
            match self.qemu_events.recv_deadline(until) {
                Ok(event) => match self.follow(&event) {
                    Ok(()) => {}
                    Err(gone @ MigrationError::VmGone(_)) => return gone,
                    // It lives.
                    Err(_) => return error,
                },
                Err(RecvTimeoutError::Timeout) => return error,
                Err(RecvTimeoutError::Disconnected) => {
                    return MigrationError::VmGone("its QEMU ended".to_owned());
                }
            }
        }
    }

    /// Ends the migration and has the VM go on here, unless it was given up.
    /// Says how it came out.
    pub(crate) fn undo(&mut self, error: &MigrationError) -> Outcome {
        let mut reason = error.to_string();
        self.let_go();
        if matches!(error, MigrationError::InDoubt(_)) {
            self.stop_stream(false);
            return Outcome::Failed(reason);
        }
        tracing::warn!(vm = self.vm.name, %error, "the migration ends; the VM stays here");
        match (error, &self.driver) {
            (_, None) => {
                if self.control.is_some() {
                    let _ = self.send(&ToDestination::Abort { reason: reason.clone() });
                }
            }
            (MigrationError::VmGone(_), _) => {
                self.step(Step::QemuGone);
                self.account_disks();
                self.stop_stream(false);
            }
            // It has come back already, if that had begun.
            _ => self.step(Step::GiveUp { reason: reason.as_str().into() }),
        }
        match error {
            MigrationError::VmGone(_) => return Outcome::Failed(reason),
            MigrationError::Cancelled => {}
            _ => reason = format!("{reason}. The VM stays where it was"),
        }
        match (&self.fate, &self.doubt) {
            (Some(Fate::Lost { reason: how }), _) => {
                return Outcome::Failed(format!("{reason}; but it ended: {how}"));
            }
            (_, Some(doubt)) => {
                let advice = doubt.advice(&self.vm.name, &self.peer.name);
                return Outcome::Failed(format!("{reason}; but it does not run: {advice}"));
            }
            _ => {}
        }
        match error {
            MigrationError::Cancelled => Outcome::Cancelled,
            _ => Outcome::Failed(reason),
        }
    }

    /// Nothing here waits for the destination any more, nor QEMU for us: what is
    /// written to it is closed, and what QEMU still says goes nowhere. Whatever slows
    /// the VM goes.
    pub(crate) fn let_go(&mut self) {
        if let Some(stream) = &self.stream {
            stream.state.end_chase();
            stream.tap.stop();
            stream.lanes.shut();
        }
        if let Some(disks) = &self.disks {
            disks.shut();
        }
        self.cut_control_if_stuck();
        if let Some(stream) = &mut self.stream {
            stream.sampler = None;
        }
    }

    /// A thread of the tap, or of a lane, may be saying something to a destination
    /// that doesn't read. Else the connection stays, to say why it ends.
    fn cut_control_if_stuck(&self) {
        if let Some(control) = &self.control {
            control.link.cut_if_stuck(SAID_MAX);
        }
    }

    /// The VM runs again if it ran before, and QEMU is as it was.
    pub(crate) fn back_out(&self, run: bool) -> Result<(), QmpError> {
        let Some(stream) = &self.stream else { return Ok(()) };
        // The tap reads on until QEMU has ended its migration in order, and waits for
        // nothing any more.
        stream.state.end_chase();
        let outcome = stream.outgoing.back_out(run);
        self.cut_control_if_stuck();
        let outcome = match outcome {
            // It hangs: whoever settles the migration later asks again.
            Err(QmpError::Timeout { .. }) => outcome,
            other => other.or_else(|_| stream.outgoing.back_out(run)),
        };
        // Channels that break under a QEMU that still migrates can hang it for good:
        // they stay, and are read, until it closes them.
        if outcome.is_ok() {
            stream.tap.cut();
        }
        outcome
    }

    /// Ends everything that lives while QEMU streams. With `in_order` all was
    /// delivered; else what QEMU still writes goes nowhere.
    pub(crate) fn stop_stream(&mut self, in_order: bool) {
        if !in_order {
            self.cut_control_if_stuck();
        }
        let Some(stream) = &mut self.stream else { return };
        stream.sampler = None;
        stream.pacing = None;
        stream.announcer = None;
        if in_order {
            stream.tap.cut();
        } else {
            stream.tap.stop();
        }
        self.cpu += if in_order { stream.lanes.finish() } else { stream.lanes.stop() };
    }

    /// What became of the disks, for the report.
    pub(crate) fn account_disks(&self) {
        if let Some(disks) = &self.disks {
            let disks = disks.reports();
            self.report_builder.tell(|report| report.disks = disks);
        }
    }

    /// What it cost, for the report.
    pub(crate) fn account(&mut self) {
        let control_bytes = self.control.as_ref().map_or(0, |control| control.link.wire_bytes());
        let cpu = self.cpu + self.stream.as_ref().map_or_else(Default::default, |s| s.tap.cpu());
        let (Some(stream), Some(pools)) = (&self.stream, &self.pools) else { return };
        let (body_bytes, fill_bytes) = stream.state.taken();
        let lanes = stream.lanes.meters().map(|(endpoint, meter)| LaneReport {
            name: endpoint.to_string(),
            wire_bytes: meter.wire_bytes.load(Relaxed),
            batches: meter.batches.load(Relaxed),
            deaths: meter.deaths.load(Relaxed),
        });
        self.report_builder.tell(|report| {
            report.ram_bytes = stream.state.ram_bytes().max(report.ram_bytes);
            report.body_bytes = body_bytes;
            report.fill_bytes = fill_bytes;
            report.dropped_bytes = stream.lanes.delivered().dropped_bytes;
            report.named_bytes = stream.lanes.delivered().found_bytes;
            report.residue_bytes = stream.state.residue_bytes.load(Relaxed);
            report.wire_bytes = stream.lanes.wire_bytes() + control_bytes;
            report.cpu_source_s = cpu.as_secs_f64();
            report.pool_high_water_bytes[0] = pools.high_water_bytes();
            report.lanes = lanes.collect();
        });
    }
}
