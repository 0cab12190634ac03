//! The point of no return, and the wait until the VM runs at the destination.

use std::time::{Duration, Instant};

use api::{Outcome, Phase};
use qemu::qmp::QmpError;
use switchover::source::{Event as Step, Outcome as Fate};
use wire::ToSource;

use super::journaled::Journaled;
use super::listening::{Happening, Listening};
use super::load::Loaded;
use super::stream::Streaming;
use super::{Ended, Failed};
use crate::error::MigrationError;
use crate::link::Received;

/// For QEMU's last answer, if the blackout bound leaves more or, for a paused VM, there is none.
const RELEASED_MAX: Duration = Duration::from_secs(5);
/// Time for the destination to write its journal and then report its costs.
const NOTED_MAX: Duration = Duration::from_secs(5);

impl<'m> Loaded<'m> {
    /// Gives the VM up, and waits until it runs at the destination.
    pub(crate) fn commit(self) -> Result<Ended, Failed<'m>> {
        let Self { mut streamed, said } = self;
        if let Err(error) = streamed.phase.compare_mapped() {
            return Err(Failed::new(streamed, error));
        }
        streamed.check_released();
        // If QEMU reports its migration completed, this journals `committed` and
        // sends `go`.
        streamed.step(Step::Received(said));
        streamed.wait_running();
        match streamed.concluded() {
            Ok(()) => Ok(streamed.end(Outcome::Done)),
            Err(error) => Err(Failed::new(streamed, error)),
        }
    }
}

impl Journaled<Streaming<'_>> {
    /// Checks that nothing has ordered QEMU to run the VM again since QEMU released it.
    fn check_released(&mut self) {
        let has_exited = self.phase.connected.context.qemu_exited;
        if has_exited || !self.driver.machine().is_released() {
            return;
        }
        match self.phase.outgoing.check_completed(self.phase.time_left(RELEASED_MAX)) {
            Ok(()) => {}
            Err(QmpError::Closed) if self.has_exited() => self.qemu_exited(),
            Err(error) => self.step(Step::NotCompleted { reason: error.to_string().into() }),
        }
    }

    fn wait_running(&mut self) {
        let until = Instant::now() + self.phase.connected.context.local.waits.run;
        while self.fate.is_none() && self.driver.machine().doubt().is_none() {
            match self.phase.next(until) {
                Ok(Happening::Said(said)) => {
                    if said.message == switchover::ToSource::Running {
                        self.phase.note_running();
                    }
                    self.step(Step::Received(said));
                }
                Ok(_) => {}
                // Without QEMU, nothing can resume the VM here, and the
                // destination's copy is as good.
                Err(MigrationError::VmGone(_)) => {
                    let context = &mut self.phase.connected.context;
                    context.qemu_events = crossbeam_channel::never();
                    // One that is ended for the VM's next QEMU is waited for when that runs the VM.
                    if !context.vm.machine.process.is_alive() {
                        self.step(Step::QemuExited);
                    }
                }
                Err(error) if Instant::now() < until => {
                    self.step(Step::ConnectionLost { reason: error.to_string().into() });
                    self.step(Step::Timeout);
                    return;
                }
                Err(_) => {
                    self.step(Step::Timeout);
                    return;
                }
            }
        }
    }

    /// The switchover's result.
    fn concluded(&self) -> Result<(), MigrationError> {
        let context = &self.phase.connected.context;
        let (vm, host) = (&context.vm.name, &context.peer.name);
        match (&self.fate, self.driver.machine().doubt()) {
            (Some(Fate::Moved), _) => {
                self.phase.wait_noted();
                Ok(())
            }
            (Some(Fate::Stays { reason }), _) if context.committed => {
                let (host, reason) = (host.clone(), reason.to_string());
                Err(MigrationError::DestinationFailed { host, reason })
            }
            (Some(Fate::Stays { reason }), _) => Err(MigrationError::Qemu(reason.to_string())),
            (Some(Fate::Lost { reason }), _) => Err(MigrationError::VmGone(reason.to_string())),
            (None, Some(doubt)) => Err(MigrationError::InDoubt(context.advice(doubt))),
            (None, None) => Err(MigrationError::InDoubt(format!(
                "{vm} runs at {host}; its QEMU here does not end; retrying"
            ))),
        }
    }
}

impl Streaming<'_> {
    fn note_running(&self) {
        let context = &self.connected.context;
        context.report_builder.enter(Phase::Running);
        let Some(stop) = context.blackout.stop() else { return };
        let downtime = stop.at.elapsed();
        let now = self.flow.lanes.delivered();
        let moving = now.busy.saturating_sub(stop.delivered.busy);
        // How long the pages of a stream take that is passed through whole isn't known.
        let is_whole = self.flow.state.whole.written().is_some();
        if self.disks.is_none() && !is_whole {
            let fixed = downtime.saturating_sub(moving);
            context.local.fixed_cost.learn(&context.peer.name, fixed);
        }
        let bytes = now.body_bytes - stop.delivered.body_bytes;
        let downtime_ms = downtime.as_secs_f64() * 1e3;
        context.report_builder.update(|report| {
            report.stopped_bytes = bytes;
            report.downtime_ms = Some(downtime_ms);
        });
    }

    /// Waits until the destination closes the connection, which it does once its
    /// journal records that it owns the VM. So a caller finds the VM there when the
    /// migration ends, free to move on.
    fn wait_noted(&self) {
        let until = Instant::now() + NOTED_MAX;
        while let Ok(received) = self.connected.control.inbox.recv_deadline(until) {
            match received {
                Received::Disconnected(_) => return,
                Received::Message(ToSource::Cost(cost)) => {
                    self.connected.context.report_builder.took_there(&cost);
                }
                _ => {}
            }
        }
    }
}
