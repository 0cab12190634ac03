//! A domain that was released: waits until it runs at the destination, or stays after all.

use std::time::{Duration, Instant};

use api::Phase;
use switchover::source::{Event, Outcome as Fate};
use wire::ToSource;

use super::leading::Leading;
use super::streaming::Streaming;
use crate::error::MigrationError;
use crate::link::Received;

/// For the destination to write its journal, and to report its costs.
const NOTED_MAX: Duration = Duration::from_secs(5);

impl Leading<'_> {
    /// Waits until the destination runs the domain, or reports that it never will.
    pub(super) fn wait_running(&mut self, streaming: &Streaming) {
        let until = Instant::now() + self.local.waits.run;
        while self.departing.fate.is_none() && self.driver.machine().doubt().is_none() {
            match self.inbox.recv_deadline(until) {
                Ok(Received::Message(ToSource::Switchover { said })) => {
                    if said.message == switchover::ToSource::Running {
                        self.note_running(streaming);
                    }
                    self.step(Event::Received(said));
                    if self.runs_there && self.departing.fate.is_none() {
                        // Only what is left of it here remains, which the agent removes.
                        return;
                    }
                }
                Ok(Received::Message(ToSource::Cost(cost))) => {
                    self.report_builder.took_there(&cost);
                }
                Ok(Received::Message(message)) => drop(streaming.flow.receive(message)),
                Ok(other) => {
                    let reason = match other {
                        Received::Disconnected(error) => error.to_string(),
                        _ => "it sent a message out of turn".to_owned(),
                    };
                    self.step(Event::ConnectionLost { reason: reason.into() });
                    self.step(Event::Timeout);
                }
                Err(_) => self.step(Event::Timeout),
            }
        }
        if self.runs_there {
            self.wait_noted();
        }
    }

    fn note_running(&mut self, streaming: &Streaming) {
        self.runs_there = true;
        self.report_builder.enter(Phase::Running);
        if let Some(suspended) = self.suspended {
            let downtime_ms = suspended.elapsed().as_secs_f64() * 1e3;
            self.report_builder.update(|report| report.downtime_ms = Some(downtime_ms));
            self.report_builder.note(
                "the downtime is counted from the start of xl's last pass, in which it suspends \
                 the domain",
            );
            if streaming.passes.seen().is_verified {
                self.report_builder.note(
                    "the downtime includes xl's comparison of all pages (xl migrate --debug), \
                     for which they are sent once more while the domain is suspended",
                );
            }
        }
    }

    /// Waits until the destination closes the connection, after it has reported its costs.
    fn wait_noted(&self) {
        let until = Instant::now() + NOTED_MAX;
        while let Ok(received) = self.inbox.recv_deadline(until) {
            match received {
                Received::Disconnected(_) => return,
                Received::Message(ToSource::Cost(cost)) => self.report_builder.took_there(&cost),
                _ => {}
            }
        }
    }

    /// The switchover's result after the commit.
    pub(super) fn concluded(&self) -> Result<(), MigrationError> {
        let (vm, host) = (&self.driver.journal().opened().vm, self.peer.name.clone());
        match (&self.departing.fate, self.driver.machine().doubt()) {
            (Some(Fate::Moved), _) => Ok(()),
            (Some(Fate::Stays { reason }), _) => {
                Err(MigrationError::DestinationFailed { host, reason: reason.to_string() })
            }
            (Some(Fate::Lost { reason }), _) => Err(MigrationError::VmGone(reason.to_string())),
            (None, _) if self.runs_there => {
                self.report_builder.note("what is left of the domain here is still removed");
                Ok(())
            }
            (None, Some(doubt)) => Err(MigrationError::InDoubt(doubt.advice_on_domain(vm, &host))),
            (None, None) => Err(MigrationError::InDoubt(format!(
                "{vm} was given to {host}, and it is not known yet whether it runs there"
            ))),
        }
    }
}
