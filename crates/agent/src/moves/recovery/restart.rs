//! Switchovers that an earlier run of the agent left: the agent searches for their QEMU, and
//! their state machine continues from its journal.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use qemu::machine::{self, Machine, StartError};
use qemu::process::ProcessError;
use qemu::qmp::RunState;
use serde::Deserialize;
use switchover::journal::{Opened, Reopened};
use switchover::{Found, destination, source};

use super::case::Case;
use super::destination_effects::{DestinationEffects, VmClaim, came_as};
use super::source_effects::SourceEffects;
use super::thread::{Request, Settler};
use crate::vms::vm::Vm;

/// The interval between attempts to reach a QEMU that lives but does not answer.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The agent ends while a thread waits for a QEMU that does not answer.
struct Closing;

pub(super) fn leaving(settler: &Settler, kept: Reopened<source::Record>) -> Option<Case> {
    let machine = settler.find(kept.same_boot).ok()?;
    let found = machine.as_deref().map_or(Found::Missing, left_as);
    let noted = kept.noted();
    let Settler { settlers, opened, .. } = settler;
    let mut effects =
        SourceEffects::new(&settlers.registry, &settlers.history, opened, machine, settler.holds());
    let driver = source::Driver::restart(kept, found, &mut effects);
    effects.restarted(noted, found);
    Some(Case::Source(driver, effects))
}

/// With `leaves`, the VM was on its way to another QEMU when the agent ended, or may have been.
pub(super) fn coming(
    settler: &Settler,
    kept: Reopened<destination::Record>,
    leaves: bool,
) -> Option<Case> {
    let machine = settler.find(kept.same_boot).ok()?;
    let found = machine.as_deref().map_or(Found::Missing, came_as);
    let noted = kept.noted();
    let registry = Arc::clone(&settler.settlers.registry);
    let vm = &settler.opened.vm;
    let place = if settler.opened.is_within_host() {
        let recorded = machine::Record::deserialize(&settler.opened.qemu).ok();
        let seat = recorded.and_then(|its| registry.seat_found(vm, machine.clone(), &its));
        seat.map(VmClaim::Next)
    } else {
        settler.place(noted, leaves)
    };
    let mut effects = DestinationEffects::new(registry, &settler.opened, machine, None, place);
    let driver = destination::Driver::restart(kept, found, &mut effects);
    effects.restarted(noted, found);
    Some(Case::Destination(driver, effects))
}

/// The state of a VM's QEMU at the source.
fn left_as(machine: &Machine) -> Found {
    match machine.qmp.run_state() {
        Ok(RunState::FinishMigrate | RunState::PostMigrate) | Err(_) => Found::Stopped,
        Ok(_) => Found::Runs,
    }
}

impl Settler {
    /// The claim of a VM that was arriving from another host. With `leaves`, it was on its way to
    /// another one, or may have been.
    fn place(&self, noted: destination::Noted, leaves: bool) -> Option<VmClaim> {
        use destination::Noted::{Left, Lost, Running};

        let (registry, vm) = (&self.settlers.registry, &self.opened.vm);
        // It had arrived before it left. Only the journal of its departure says whose it is now,
        // and frees it.
        let arrived_before = leaves && matches!(noted, Running | Left | Lost);
        if arrived_before && let Some(vm) = registry.vm(vm).filter(|vm| self.is_about(vm)) {
            // If its record does not show it yet, it is tried again, and the journal stays until
            // then.
            let _ = vm.save_here();
        }
        let holds = !arrived_before && self.holds();
        holds.then(|| VmClaim::Found(registry.claim_found(vm)))
    }

    /// Finds the VM's QEMU; none if it has ended.
    fn find(&self, same_boot: bool) -> Result<Option<Arc<Machine>>, Closing> {
        let found = if same_boot { self.search()? } else { None };
        if self.opened.is_within_host()
            && let Some(machine) = &found
        {
            machine.is_one_of_two(true);
        }
        Ok(found)
    }

    /// Waits for a QEMU that lives but can't be reached, because its state must not be guessed.
    fn search(&self) -> Result<Option<Arc<Machine>>, Closing> {
        let record = match machine::Record::deserialize(&self.opened.qemu) {
            Ok(record) => record,
            Err(error) => return Err(self.cannot_read(&error)),
        };
        let registry = &self.settlers.registry;
        loop {
            let vm = registry.vm(&self.opened.vm);
            let known = [vm.clone(), registry.next(&self.opened.vm)].into_iter().flatten();
            let mut known = known.filter_map(|vm| vm.machine());
            if let Some(machine) = known.find(|machine| machine.record().is_of(&record)) {
                return Ok(Some(machine));
            }
            let dir = registry.state().vm(&self.opened.vm);
            // Of two QEMUs, neither is known to be that of a VM without a record.
            let is_its = |vm: &Vm| {
                let is_sure = !self.opened.is_within_host() || vm.unreadable_why().is_none();
                is_sure && self.is_about(vm)
            };
            match (machine::reopen(&record, &dir), &vm) {
                (Ok(machine), Some(vm)) if is_its(vm) => vm.met(machine),
                (Ok(machine), _) => return Ok(Some(Arc::new(machine))),
                (Err(StartError::Process(ProcessError::Exited { .. })), _) => return Ok(None),
                (Err(error), _) => {
                    self.show(Some(format!(
                        "the fate of {} is not known: its QEMU exists and can't be queried \
                         ({error}); the agent retries",
                        self.opened.vm
                    )));
                    self.wait()?;
                }
            }
        }
    }

    /// Waits until the agent ends, where the journal describes the QEMU as this release can't read
    /// it: it may run the VM.
    fn cannot_read(&self, error: &serde_json::Error) -> Closing {
        let Opened { vm, .. } = &self.opened;
        self.show(Some(format!(
            "the fate of {vm} is not known: the journal of its migration was written by another \
             release of Droveway, and this one can't find its QEMU from it ({error}). The agent \
             does not touch {vm} until it is of that release again, or newer, or the host is \
             rebooted"
        )));
        while self.wait().is_ok() {}
        Closing
    }

    /// Whether the VM of that name is reserved for this switchover, and not for that of another
    /// VM which has had the name since.
    fn holds(&self) -> bool {
        let (registry, name) = (&self.settlers.registry, &self.opened.vm);
        registry.is_unsettled(name) && registry.vm(name).is_none_or(|vm| self.is_about(&vm))
    }

    /// Waits before the next attempt; requests get no answer meanwhile.
    fn wait(&self) -> Result<(), Closing> {
        match self.told.recv_timeout(ASK_AGAIN) {
            Ok(
                Request::Message(..) | Request::Resolve(..) | Request::Takes(..) | Request::Left(_),
            )
            | Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Closing),
        }
    }
}

#[cfg(test)]
mod tests;
