//! One switchover, on either side.

use std::collections::VecDeque;

use switchover::{Doubt, Resolution, Wait, destination, source};
use wire::SwitchoverMessage;

use super::destination_effects::DestinationEffects;
use super::source_effects::SourceEffects;

/// The state machine that decides, and the effects that carry its decisions out.
pub(super) enum Case {
    Source(source::Driver, SourceEffects),
    Destination(destination::Driver, DestinationEffects),
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

    /// The messages to send to the other side.
    pub(super) fn outbox(&mut self) -> &mut VecDeque<SwitchoverMessage> {
        match self {
            Self::Source(_, effects) => &mut effects.outbox,
            Self::Destination(_, effects) => &mut effects.outbox,
        }
    }

    pub(super) fn received(&mut self, message: SwitchoverMessage) {
        match (self, message) {
            (Self::Source(driver, effects), SwitchoverMessage::ToSource(said)) => {
                driver.step(source::Event::Received(said), effects);
            }
            (Self::Destination(driver, effects), SwitchoverMessage::ToDestination(said)) => {
                driver.step(destination::Event::Received(said), effects);
            }
            (_, ignored) => tracing::warn!(?ignored, "a switchover message for the other side"),
        }
    }

    /// Handles a timeout.
    pub(super) fn late(&mut self) {
        match self {
            Self::Source(driver, effects) => {
                let event = match effects.qemu_has_exited() {
                    true => source::Event::QemuExited,
                    false => source::Event::Timeout,
                };
                driver.step(event, effects);
            }
            Self::Destination(driver, effects) => {
                let doubt = driver.machine().doubt();
                let untried = matches!(doubt, Some(Doubt::TakenBackMeanwhile { .. }));
                let event = match () {
                    () if effects.qemu_has_exited() => destination::Event::QemuExited,
                    // An earlier `cont` may have been carried out without an answer.
                    () if untried && effects.vm_runs() => destination::Event::Runs,
                    () => destination::Event::Timeout,
                };
                driver.step(event, effects);
            }
        }
    }

    /// Whether the operator's decision would change anything.
    pub(super) fn takes(&self, resolution: Resolution) -> bool {
        match self {
            Self::Source(driver, _) => driver.machine().takes(resolution),
            Self::Destination(driver, _) => driver.machine().takes(resolution),
        }
    }

    /// Applies the operator's decision; returns whether it changes anything.
    pub(super) fn resolve(&mut self, resolution: Resolution) -> bool {
        if !self.takes(resolution) {
            return false;
        }
        match self {
            Self::Source(driver, effects) => {
                driver.step(source::Event::Resolve(resolution), effects);
            }
            Self::Destination(driver, effects) => {
                driver.step(destination::Event::Resolve(resolution), effects);
            }
        }
        true
    }

    /// Notes that the VM's owner has taken over.
    pub(super) fn left(&mut self) {
        if let Self::Destination(driver, effects) = self {
            driver.step(destination::Event::Left, effects);
        }
    }
}
