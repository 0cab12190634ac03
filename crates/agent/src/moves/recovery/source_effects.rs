//! Carries out the decisions of the source side after its migration has ended.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::RamBack;
use qemu::machine::{self, Machine};
use qemu::outgoing;
use serde::Deserialize;
use switchover::journal::Opened;
use switchover::source::{Effects, Event, Noted, Outcome};
use switchover::{Doubt, Envelope, Found, ToDestination};
use wire::SwitchoverMessage;

use crate::moves::history::History;
use crate::vms::registry::Registry;

pub(super) struct SourceEffects {
    registry: Arc<Registry>,
    history: Arc<History>,
    opened: Opened,
    /// None once it has ended.
    machine: Option<Arc<Machine>>,
    /// Whether the VM is reserved until the decision.
    holds: bool,
    pub(super) outbox: VecDeque<SwitchoverMessage>,
}

impl SourceEffects {
    pub(super) fn new(
        registry: &Arc<Registry>,
        history: &Arc<History>,
        opened: &Opened,
        machine: Option<Arc<Machine>>,
        holds: bool,
    ) -> Self {
        let (registry, history) = (Arc::clone(registry), Arc::clone(history));
        let (opened, outbox) = (opened.clone(), VecDeque::new());
        Self { registry, history, opened, machine, holds, outbox }
    }

    /// Whether QEMU has ended since the last check.
    pub(super) fn qemu_has_exited(&mut self) -> bool {
        self.machine.take_if(|machine| !machine.process.is_alive()).is_some()
    }

    /// Carries out a decision from before the restart, if that was not done.
    pub(super) fn restarted(&mut self, noted: Noted, found: Found) {
        if let Some(outcome) = noted.decided(found) {
            self.done(outcome);
        }
    }

    /// The VM is freed when both sides are settled.
    fn done_within(&self, outcome: &Outcome) {
        let vm = &self.opened.vm;
        match (outcome, &self.machine, machine::Record::deserialize(&self.opened.qemu)) {
            (Outcome::Moved, _, Ok(former)) => self.registry.empty_seat(vm, &former),
            (Outcome::Stays { .. }, Some(machine), _) => self.registry.keeps(vm, machine),
            _ => {}
        }
    }
}

impl Effects for SourceEffects {
    fn send(&mut self, said: &Envelope<ToDestination>) {
        self.outbox.push_back(SwitchoverMessage::ToDestination(said.clone()));
    }

    /// Only a running migration waits for QEMU's completion, before the commit.
    fn await_completed(&mut self) -> Event {
        Event::NotCompleted { reason: "its migration has ended".into() }
    }

    fn go_on(&mut self, run: bool) -> Event {
        let Some(machine) = &self.machine else { return Event::QemuExited };
        let taken = match self.opened.handed_over {
            true => self.registry.take_ram_back(&self.opened.vm, machine),
            false => Ok(RamBack::PutBack),
        };
        let run = match taken {
            Ok(RamBack::PutBack) => run,
            // It runs, or stands still, as whatever has ordered its QEMU to run it left it.
            Ok(RamBack::Ran(_)) => false,
            Err(_) if !machine.process.is_alive() => return Event::QemuExited,
            Err(why) => return Event::CannotGoOn { reason: why.into() },
        };
        match outgoing::resume(machine, run) {
            Ok(left) => {
                // Of that QEMU only: another VM may have had the name since.
                let vm = self.registry.vm(&self.opened.vm);
                if let Some(vm) = vm.filter(|vm| vm.may_be_of(&machine.record())) {
                    vm.stuck_by(left);
                }
                Event::WentOn
            }
            Err(_) if !machine.process.is_alive() => Event::QemuExited,
            Err(error) => Event::CannotGoOn { reason: error.to_string().into() },
        }
    }

    fn quit(&mut self) -> bool {
        let Some(machine) = &self.machine else { return true };
        match machine.quit() {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "it runs elsewhere; its QEMU here stays");
                false
            }
        }
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::error!(?doubt, "in doubt");
    }

    fn done(&mut self, outcome: Outcome) {
        tracing::info!(?outcome, "settled");
        // First, so that no caller finds the VM free and its migration in doubt.
        self.history.settled(&self.opened, &outcome);
        if self.opened.is_within_host() {
            self.done_within(&outcome);
            return;
        }
        if !std::mem::take(&mut self.holds) {
            return;
        }
        match outcome {
            Outcome::Moved => self.registry.moved(&self.opened.vm),
            Outcome::Stays { .. } | Outcome::Lost { .. } => self.registry.stays(&self.opened.vm),
        }
    }
}
