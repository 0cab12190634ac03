//! One switchover, of either side.

use std::collections::VecDeque;

use switchover::{Doubt, Resolution, Wait, destination, source};
use wire::Word;

use super::coming::Coming;
use super::leaving::Leaving;

/// What decides, and the hands that do it.
pub(super) enum Case {
    Leaving(source::Driver, Leaving),
    Coming(destination::Driver, Coming),
}

impl Case {
    /// What it waits for; none when it is over.
    pub(super) fn wait(&self) -> Option<Wait> {
        match self {
            Self::Leaving(driver, _) => driver.machine().wait(),
            Self::Coming(driver, _) => driver.machine().wait(),
        }
    }

    pub(super) fn doubt(&self) -> Option<&Doubt> {
        match self {
            Self::Leaving(driver, _) => driver.machine().doubt(),
            Self::Coming(driver, _) => driver.machine().doubt(),
        }
    }

    /// What is to be said to the other side.
    pub(super) fn outbox(&mut self) -> &mut VecDeque<Word> {
        match self {
            Self::Leaving(_, hands) => &mut hands.outbox,
            Self::Coming(_, hands) => &mut hands.outbox,
        }
    }

    pub(super) fn heard(&mut self, word: Word) {
        match (self, word) {
            (Self::Leaving(driver, hands), Word::ToSource(said)) => {
                driver.step(source::Event::Heard(said), hands);
            }
            (Self::Coming(driver, hands), Word::ToDestination(said)) => {
                driver.step(destination::Event::Heard(said), hands);
            }
            (_, word) => tracing::warn!(?word, "not a word to this side"),
        }
    }

    /// Nothing has come for a while.
    pub(super) fn late(&mut self) {
        match self {
            Self::Leaving(driver, hands) => {
                let event = match hands.qemu_has_gone() {
                    true => source::Event::QemuGone,
                    false => source::Event::Timeout,
                };
                driver.step(event, hands);
            }
            Self::Coming(driver, hands) => {
                let event = match hands.qemu_has_gone() {
                    true => destination::Event::QemuGone,
                    false => destination::Event::Timeout,
                };
                driver.step(event, hands);
            }
        }
    }

    /// Whether the operator's decision changes anything.
    pub(super) fn resolve(&mut self, resolution: Resolution) -> bool {
        match self {
            Self::Leaving(driver, hands) if driver.machine().takes(resolution) => {
                driver.step(source::Event::Resolve(resolution), hands);
                true
            }
            Self::Coming(driver, hands) if driver.machine().takes(resolution) => {
                driver.step(destination::Event::Resolve(resolution), hands);
                true
            }
            _ => false,
        }
    }

    /// The VM is its owner's matter from now on.
    pub(super) fn left(&mut self) {
        if let Self::Coming(driver, hands) = self {
            driver.step(destination::Event::Left, hands);
        }
    }
}
