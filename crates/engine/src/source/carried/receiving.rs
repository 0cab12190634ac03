//! Handles the messages of the destination's agent while pages are sent, and its QEMU's
//! answers.

use api::Phase;
use wire::ToSource;

use super::running::Running;
use super::way_back::Passed;
use crate::error::MigrationError;
use crate::link::Received;
use crate::source::audit::Compared;

impl Running<'_> {
    pub(super) fn receive(&mut self, received: Received<ToSource>) -> Result<(), MigrationError> {
        let message = match received {
            Received::Back(bytes) => return self.back(&bytes),
            // Everything was answered: QEMU here is about to close.
            Received::Disconnected(_) if self.is_loaded() => None,
            Received::Message(message) => self.flow.receive(message),
            other => return Err(self.split.agents.ended(other)),
        };
        match message {
            None => {}
            Some(ToSource::Note { text }) => self.report_builder.note(text),
            Some(ToSource::Share) => {
                if let Some(stage) = &self.flow.stage {
                    stage.naming().wake();
                }
            }
            Some(ToSource::Cost(cost)) => {
                self.report_builder.took_there(&cost);
                self.is_accounted = true;
            }
            Some(other) => self.compare(other)?,
        }
        Ok(())
    }

    fn compare(&mut self, received: ToSource) -> Result<(), MigrationError> {
        let agents = &self.split.agents;
        match self.audit.receive(&received)? {
            None => Err(agents.ended(Received::Message(received))),
            Some(Compared::Waits) => Ok(()),
            Some(Compared::Asks(said)) => agents.send(&said),
            Some(Compared::Same) => {
                self.tail.go_on(&agents.link).map_err(|error| agents.lost(error))
            }
        }
    }

    /// Passes on the answers of the destination's QEMU unchanged, and at once except its
    /// permission to stop the VM.
    fn back(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        if bytes.is_empty() {
            return if self.is_loaded() { Ok(()) } else { Err(self.split.agents.closed_early()) };
        }
        let passed = self.way_back.pass(bytes).map_err(|error| {
            MigrationError::Qemu(format!("it does not accept the destination's answer: {error}"))
        })?;
        match passed {
            Passed::On => {}
            Passed::ButAcknowledgement => {
                self.report_builder
                    .note("QEMU waits until the agent allows it to stop the VM (switchover-ack)");
            }
            Passed::Loaded => {
                self.report_builder.enter(Phase::Loaded);
                if let Some(stopped) = self.stopped {
                    let took = stopped.elapsed().as_secs_f64() * 1e3;
                    self.report_builder.note(format!(
                        "from the last page that QEMU handed over until its destination had \
                         loaded the VM it took {took:.0} ms"
                    ));
                }
                self.report_builder.enter(Phase::Committed);
            }
        }
        Ok(())
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.way_back.is_loaded()
    }
}
