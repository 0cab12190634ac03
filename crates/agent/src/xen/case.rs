//! One switchover of a domain, on either side.

use std::collections::VecDeque;

use engine::{ArrivingDomain, DepartingDomain};
use switchover::{Doubt, Resolution, Wait, destination, source};
use wire::SwitchoverMessage;

/// The state machine that decides, and the domain.
pub(super) enum Case {
    Source(source::Driver, DepartingDomain),
    Destination(destination::Driver, ArrivingDomain),
}

impl Case {
    /// What the state machine waits for; none when it has ended.
    pub(super) fn wait(&self) -> Option<Wait> {
        match self {
            Self::Source(driver, _) => driver.machine().wait(),
            Self::Destination(driver, _) => driver.machine().wait(),
        }
    }

    pub(super) fn doubt(&self) -> Option<&Doubt> {
        match self {
            Self::Source(driver, _) => driver.machine().doubt(),
            Self::Destination(driver, _) => driver.machine().doubt(),
        }
    }

    /// Takes the messages to send to the other side.
    pub(super) fn take_messages(&mut self) -> VecDeque<SwitchoverMessage> {
        match self {
            Self::Source(_, domain) => {
                domain.outbox.drain(..).map(SwitchoverMessage::ToDestination).collect()
            }
            Self::Destination(_, domain) => {
                domain.outbox.drain(..).map(SwitchoverMessage::ToSource).collect()
            }
        }
    }

    /// Takes how the domain's fate was decided at its source, if it just was.
    pub(super) fn take_fate(&mut self) -> Option<source::Outcome> {
        match self {
            Self::Source(_, domain) => domain.fate.take(),
            Self::Destination(_, domain) => {
                domain.fate = None;
                None
            }
        }
    }

    pub(super) fn received(&mut self, message: SwitchoverMessage) {
        match (self, message) {
            (Self::Source(driver, domain), SwitchoverMessage::ToSource(said)) => {
                driver.step(source::Event::Received(said), domain);
            }
            (Self::Destination(driver, domain), SwitchoverMessage::ToDestination(said)) => {
                driver.step(destination::Event::Received(said), domain);
            }
            (_, ignored) => tracing::warn!(?ignored, "a switchover message for the other side"),
        }
    }

    /// Handles a timeout.
    pub(super) fn late(&mut self) {
        match self {
            Self::Source(driver, domain) => driver.step(source::Event::Timeout, domain),
            Self::Destination(driver, domain) => driver.step(destination::Event::Timeout, domain),
        }
    }

    /// Applies the operator's decision; returns whether it changes anything.
    pub(super) fn resolve(&mut self, resolution: Resolution) -> bool {
        match self {
            Self::Source(driver, domain) if driver.machine().takes(resolution) => {
                driver.step(source::Event::Resolve(resolution), domain);
                true
            }
            Self::Destination(driver, domain) if driver.machine().takes(resolution) => {
                driver.step(destination::Event::Resolve(resolution), domain);
                true
            }
            _ => false,
        }
    }
}
