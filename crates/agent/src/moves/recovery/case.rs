//! One switchover of a VM, on either side.

use std::collections::VecDeque;

use switchover::{Doubt, destination, source};
use wire::SwitchoverMessage;

use super::destination_effects::DestinationEffects;
use super::either_side::EitherSide;
use super::source_effects::SourceEffects;

pub(super) type Case = EitherSide<SourceEffects, DestinationEffects>;

impl Case {
    /// The messages to send to the other side.
    pub(super) fn outbox(&mut self) -> &mut VecDeque<SwitchoverMessage> {
        match self {
            Self::Source(_, effects) => &mut effects.outbox,
            Self::Destination(_, effects) => &mut effects.outbox,
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

    /// Notes that the VM's owner has taken over.
    pub(super) fn left(&mut self) {
        if let Self::Destination(driver, effects) = self {
            driver.step(destination::Event::Left, effects);
        }
    }
}
