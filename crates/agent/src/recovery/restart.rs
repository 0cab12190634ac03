//! Switchovers that an earlier run of the agent left: their QEMU is looked for,
//! and their machine goes on from its journal.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use qemu::machine::{self, Machine, StartError};
use qemu::process::ProcessError;
use qemu::qmp::RunState;
use serde::Deserialize;
use switchover::journal::Reopened;
use switchover::{Found, destination, source};

use super::case::Case;
use super::destination_effects::{DestinationEffects, Place};
use super::source_effects::SourceEffects;
use super::thread::{Request, Settler};

/// A QEMU that is there and does not answer is asked again after this.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Somebody waits for a QEMU that doesn't answer, and the agent ends.
struct Closing;

pub(super) fn leaving(settler: &Settler, kept: Reopened<source::Record>) -> Option<Case> {
    let machine = settler.find(kept.same_boot).ok()?;
    let found = machine.as_deref().map_or(Found::Gone, left_as);
    let noted = kept.noted();
    let registry = Arc::clone(&settler.settlers.registry);
    let holds = registry.is_unsettled(&settler.opened.vm);
    let mut effects = SourceEffects::new(registry, &settler.opened, machine, holds);
    let driver = source::Driver::restart(kept, found, &mut effects);
    effects.restarted(noted, found);
    Some(Case::Source(driver, effects))
}

pub(super) fn coming(settler: &Settler, kept: Reopened<destination::Record>) -> Option<Case> {
    let machine = settler.find(kept.same_boot).ok()?;
    let found = machine.as_deref().map_or(Found::Gone, came_as);
    let noted = kept.noted();
    let registry = Arc::clone(&settler.settlers.registry);
    let vm = &settler.opened.vm;
    let place = registry.is_unsettled(vm);
    let place = place.then(|| Place::Found(registry.claim_found(vm)));
    let mut effects = DestinationEffects::new(registry, vm, machine, None, place);
    let driver = destination::Driver::restart(kept, found, &mut effects);
    effects.restarted(noted, found);
    Some(Case::Destination(driver, effects))
}

/// What its migration left of a VM at its source.
fn left_as(machine: &Machine) -> Found {
    match machine.qmp.run_state() {
        Ok(RunState::FinishMigrate | RunState::PostMigrate) | Err(_) => Found::Stopped,
        Ok(_) => Found::Runs,
    }
}

/// What there is of a VM at its destination.
fn came_as(machine: &Machine) -> Found {
    match machine.qmp.run_state() {
        Ok(RunState::InMigrate | RunState::Paused | RunState::Prelaunch) | Err(_) => Found::Stopped,
        Ok(_) => Found::Runs,
    }
}

impl Settler {
    /// Its QEMU, or that it is gone. One that is there but can't be met is
    /// waited for: what it holds must not be guessed.
    fn find(&self, same_boot: bool) -> Result<Option<Arc<Machine>>, Closing> {
        let Ok(record) = machine::Record::deserialize(&self.opened.qemu) else { return Ok(None) };
        if !same_boot {
            return Ok(None);
        }
        let registry = &self.settlers.registry;
        loop {
            let vm = registry.vm(&self.opened.vm);
            let known = vm.as_ref().and_then(|vm| vm.machine());
            if let Some(machine) = known.filter(|machine| machine.record().is_of(&record)) {
                return Ok(Some(machine));
            }
            let dir = registry.state().vm(&self.opened.vm);
            match (machine::reopen(&record, &dir), &vm) {
                (Ok(machine), Some(vm)) => vm.met(machine),
                (Ok(machine), None) => return Ok(Some(Arc::new(machine))),
                (Err(StartError::Process(ProcessError::Gone { .. })), _) => return Ok(None),
                (Err(error), _) => {
                    self.show(Some(format!(
                        "what became of {} is not known: its QEMU is there and can't be asked \
                         ({error}); this is tried again",
                        self.opened.vm
                    )));
                    self.wait()?;
                }
            }
        }
    }

    /// Nobody is answered meanwhile.
    fn wait(&self) -> Result<(), Closing> {
        match self.told.recv_timeout(ASK_AGAIN) {
            Ok(Request::Word(..) | Request::Resolve(..) | Request::Left(_))
            | Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Closing),
        }
    }
}
