//! A phase of a migration that has a journal: `switchover::source` decides who has the
//! VM, and what is done about it.

use api::Outcome;
use qemu::qmp::QmpError;
use switchover::source::{Driver, Event as Step, Outcome as Fate};

use super::Ended;
use super::connect::Connected;
use super::effects::Switching;

/// A phase, and what decides who has the VM.
pub(crate) struct Journaled<P> {
    pub(crate) phase: P,
    pub(crate) driver: Driver,
    /// What it has decided. None: nothing yet.
    pub(crate) fate: Option<Fate>,
}

/// A phase that the switchover can end, one way or the other.
pub(crate) trait Reversible<'m> {
    fn connected(&self) -> &Connected<'m>;

    fn connected_mut(&mut self) -> &mut Connected<'m>;

    /// Nothing here waits for the destination any more, nor QEMU for us. Whatever
    /// throttles the VM goes.
    fn let_go(&mut self);

    /// Waits until QEMU says how its migration ended.
    fn await_completed(&self) -> Step;

    /// The VM runs again if it ran before, and QEMU is as it was.
    fn back_out(&mut self, run: bool) -> Result<(), QmpError>;

    /// All was delivered: ends in order.
    fn finish(&mut self);

    /// The VM is not here any more, or in doubt: what QEMU still writes goes nowhere.
    fn abandon(&mut self);

    /// What became of the disks, for the report.
    fn account_disks(&self);

    /// What it cost, for the report.
    fn account(&self);
}

impl<P> Journaled<P> {
    pub(crate) fn new(phase: P, driver: Driver) -> Self {
        Self { phase, driver, fate: None }
    }
}

impl<'m, P: Reversible<'m>> Journaled<P> {
    /// Tells the switchover, and does what follows.
    pub(crate) fn step(&mut self, event: Step) {
        let Self { phase, driver, fate } = self;
        driver.step(event, &mut Switching::new(phase, fate));
    }

    pub(crate) fn end(self, outcome: Outcome) -> Ended {
        let Self { phase, driver, fate } = self;
        phase.account();
        let unsettled = Some(driver).filter(|driver| !driver.machine().is_over());
        let decided = fate.is_some() || unsettled.is_none();
        // QEMU's settings are back, and its sockets closed, when this is.
        drop(phase);
        Ended { outcome, unsettled, decided }
    }
}
