//! A phase of a migration that has a journal: `switchover::source` decides who owns
//! the VM, and what to do.

use api::Outcome;
use qemu::qmp::QmpError;
use switchover::source::{Driver, Event as Step, Outcome as Fate};

use super::Ended;
use super::connect::Connected;
use super::effects::Switching;
use crate::source::Settlement;

/// A phase, and the state machine that decides who owns the VM.
pub(crate) struct Journaled<P> {
    pub(crate) phase: P,
    pub(crate) driver: Driver,
    /// Its decision; none yet.
    pub(crate) fate: Option<Fate>,
}

/// A phase that the switchover can end, by commit or by undoing it.
pub(crate) trait Reversible<'m> {
    fn connected(&self) -> &Connected<'m>;

    fn connected_mut(&mut self) -> &mut Connected<'m>;

    /// Stops waiting for the destination, and making QEMU wait. Ends throttling.
    fn let_go(&mut self);

    /// Waits until QEMU reports how its migration ended.
    fn await_completed(&self) -> Step;

    /// Lets the VM run again if `run`, and restores QEMU.
    fn back_out(&mut self, run: bool) -> Result<(), QmpError>;

    /// Ends in an orderly way, after everything was delivered.
    fn finish(&mut self);

    /// Ends when the VM is no longer here, or in doubt: what QEMU still writes is
    /// discarded.
    fn abandon(&mut self);

    /// Reports the disks' figures.
    fn account_disks(&self);

    /// Reports the costs.
    fn account(&self);
}

impl<P> Journaled<P> {
    pub(crate) fn new(phase: P, driver: Driver) -> Self {
        Self { phase, driver, fate: None }
    }
}

impl<'m, P: Reversible<'m>> Journaled<P> {
    /// Passes an event to the switchover, and carries out its decision.
    pub(crate) fn step(&mut self, event: Step) {
        let Self { phase, driver, fate } = self;
        driver.step(event, &mut Switching::new(phase, fate));
    }

    pub(crate) fn end(self, outcome: Outcome) -> Ended {
        let Self { phase, driver, fate } = self;
        phase.account();
        let settlement = if driver.machine().has_ended() {
            Settlement::Settled
        } else if fate.is_some() {
            Settlement::Undelivered(driver)
        } else {
            Settlement::InDoubt(Some(driver))
        };
        // This restores QEMU's settings and closes its sockets.
        drop(phase);
        Ended { outcome, settlement }
    }
}
