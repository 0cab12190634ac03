//! One switchover, on either side: what VMs and domains have in common.

use std::time::Duration;

use switchover::{Doubt, Resolution, Wait, destination, source};
use wire::SwitchoverMessage;

/// Messages to send in a row, each in reply to an answer, before the thread waits again.
pub(crate) const MESSAGES_MAX: usize = 8;
/// How often the wait doubles while nothing changes: up to eight times as long.
pub(crate) const PATIENCE_MAX: u32 = 3;

/// The state machine that decides, and the effects that carry its decisions out.
pub(crate) enum EitherSide<S, D> {
    Source(source::Driver, S),
    Destination(destination::Driver, D),
}

impl<S: source::Effects, D: destination::Effects> EitherSide<S, D> {
    /// What the state machine waits for; none when it has ended.
    pub(crate) fn wait(&self) -> Option<Wait> {
        match self {
            Self::Source(driver, _) => driver.machine().wait(),
            Self::Destination(driver, _) => driver.machine().wait(),
        }
    }

    pub(crate) fn doubt(&self) -> Option<&Doubt> {
        match self {
            Self::Source(driver, _) => driver.machine().doubt(),
            Self::Destination(driver, _) => driver.machine().doubt(),
        }
    }

    pub(crate) fn received(&mut self, message: SwitchoverMessage) {
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

    /// Whether the operator's decision would change anything.
    pub(crate) fn takes(&self, resolution: Resolution) -> bool {
        match self {
            Self::Source(driver, _) => driver.machine().takes(resolution),
            Self::Destination(driver, _) => driver.machine().takes(resolution),
        }
    }

    /// Applies the operator's decision; returns whether it changes anything.
    pub(crate) fn resolve(&mut self, resolution: Resolution) -> bool {
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
}

/// How long the thread waits, after so many waits in vain.
pub(crate) fn pause(wait: Wait, tries: u32) -> Duration {
    let first = match wait {
        Wait::Answer | Wait::Retry => Duration::from_secs(1),
        Wait::Peer | Wait::Settled => Duration::from_secs(5),
    };
    first * (1 << tries)
}
