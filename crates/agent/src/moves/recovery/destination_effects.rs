//! Carries out the decisions of the destination side after its arrival has ended.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use engine::{Arriving, NotAlone};
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::outgoing;
use qemu::qmp::{QmpError, RunState};
use switchover::destination::{Effects, Event, Noted, Outcome};
use switchover::journal::Opened;
use switchover::{Doubt, Envelope, Found, Reason, ToSource};
use wire::SwitchoverMessage;

use crate::vms::registry::{Claim, Registry, Seat};

/// `cont` opens the disks: a slow storage network may take seconds.
const CONT_MAX: Duration = Duration::from_secs(30);

/// A VM's claim on this host, until it is decided whose the VM is.
pub(super) enum VmClaim {
    /// It was arriving when its connection was lost.
    Live(Box<dyn Arriving>),
    /// It was arriving when an earlier run of the agent ended.
    Found(Claim),
    /// It was getting another QEMU on this host then.
    Next(Seat),
}

impl VmClaim {
    fn adopt(&mut self) -> Result<(), String> {
        match self {
            Self::Live(arriving) => arriving.adopt(),
            Self::Found(claim) => claim.adopt().map_err(|denied| denied.to_string()),
            Self::Next(seat) => seat.adopt().map_err(|denied| denied.to_string()),
        }
    }

    /// See [`Arriving::lost`].
    fn lost(&mut self) -> Result<(), String> {
        match self {
            Self::Live(arriving) => arriving.lost(),
            Self::Found(_) => self.adopt(),
            Self::Next(_) => Ok(()),
        }
    }

    fn settled(self) {
        match self {
            Self::Live(arriving) => arriving.settled(),
            Self::Found(claim) => claim.free(),
            // If it doesn't have the VM, it has ended.
            Self::Next(seat) => drop(seat),
        }
    }

    fn discard(self) {
        match self {
            Self::Live(arriving) => arriving.discard(),
            Self::Found(claim) => drop(claim),
            Self::Next(seat) => drop(seat),
        }
    }
}

pub(super) struct DestinationEffects {
    registry: Arc<Registry>,
    vm: String,
    /// Whether a former QEMU has the same RAM or taps, and has to end first.
    handed_over: bool,
    /// None once it has ended.
    machine: Option<Arc<Machine>>,
    /// QEMU's end of the migration, unless the agent was restarted since.
    incoming: Option<Arc<Incoming>>,
    /// Not dropped with the agent: an agent that ends before the decision changes nothing.
    place: Option<ManuallyDrop<VmClaim>>,
    ran: bool,
    pub(super) outbox: VecDeque<SwitchoverMessage>,
}

impl DestinationEffects {
    pub(super) fn new(
        registry: Arc<Registry>,
        opened: &Opened,
        machine: Option<Arc<Machine>>,
        incoming: Option<Arc<Incoming>>,
        place: Option<VmClaim>,
    ) -> Self {
        let place = place.map(ManuallyDrop::new);
        let (vm, handed_over) = (opened.vm.clone(), opened.handed_over);
        let outbox = VecDeque::new();
        Self { registry, vm, handed_over, machine, incoming, place, ran: false, outbox }
    }

    /// Whether QEMU has ended since the last check.
    pub(super) fn qemu_has_exited(&mut self) -> bool {
        self.machine.take_if(|machine| !machine.process.is_alive()).is_some()
    }

    /// Whether QEMU reports that it runs the VM, or has run it.
    pub(super) fn vm_runs(&mut self) -> bool {
        let runs = self.machine.as_deref().is_some_and(|machine| came_as(machine) == Found::Runs);
        self.ran |= runs;
        runs
    }

    /// The VM is not run here, because of its former QEMU on this host.
    fn not_alone(&mut self, error: &NotAlone) -> Event {
        let reason = error.to_string().into();
        match error {
            NotAlone::Runs(_) => Event::ContFailed { reason, never_ran: true },
            NotAlone::Ran(_) if self.kill() => Event::QemuExited,
            NotAlone::MayLive(_) | NotAlone::Ran(_) => {
                Event::ContFailed { reason, never_ran: false }
            }
        }
    }

    /// Carries out a decision from before the restart, if that was not done.
    pub(super) fn restarted(&mut self, noted: Noted, found: Found) {
        let reason = || "as recorded before the agent was restarted".into();
        match (noted, found) {
            (Noted::Running | Noted::Left, _) => self.done(Outcome::Here),
            (Noted::Lost, _) => self.done(Outcome::Lost { reason: reason() }),
            (Noted::Refused, Found::Missing) => self.done(Outcome::NotHere { reason: reason() }),
            _ => {}
        }
    }
}

impl Effects for DestinationEffects {
    fn send(&mut self, said: &Envelope<ToSource>) {
        self.outbox.push_back(SwitchoverMessage::ToSource(said.clone()));
    }

    fn cont(&mut self) -> Event {
        let Some(machine) = &self.machine else { return Event::QemuExited };
        // The former QEMU is not ended for one that can't run.
        if !machine.process.is_alive() {
            return Event::QemuExited;
        }
        if self.handed_over
            && let Err(error) = self.registry.be_alone(&self.vm, machine)
        {
            return self.not_alone(&error);
        }
        match machine.qmp.execute_within("cont", serde_json::json!({}), CONT_MAX) {
            Ok(_) => {
                self.ran = true;
                Event::Runs
            }
            Err(_) if !machine.process.is_alive() => Event::QemuExited,
            Err(error) => {
                // There is no other QEMU that could go on.
                let never_ran = !self.handed_over && matches!(error, QmpError::Refused { .. });
                Event::ContFailed { reason: error.to_string().into(), never_ran }
            }
        }
    }

    fn settle(&mut self) {
        let Some(machine) = &self.machine else { return };
        match &self.incoming {
            Some(incoming) if self.ran => incoming.announce(),
            Some(incoming) => incoming.restore(),
            None => {
                if let Err(error) = outgoing::make_up(machine) {
                    tracing::warn!(%error, "cannot restore QEMU's settings");
                }
                if self.ran {
                    outgoing::announce(machine);
                }
            }
        }
    }

    fn kill(&mut self) -> bool {
        let Some(machine) = &self.machine else { return true };
        match machine.quit() {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "the QEMU of a VM that doesn't arrive can't be ended");
                false
            }
        }
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::error!(?doubt, "in doubt");
    }

    fn done(&mut self, outcome: Outcome) {
        tracing::info!(?outcome, "settled");
        let Some(mut place) = self.place.take().map(ManuallyDrop::into_inner) else { return };
        match outcome {
            // A VM that was lost here is shown as dead.
            Outcome::Here | Outcome::Lost { .. } => {
                let noted = if outcome == Outcome::Here { place.adopt() } else { place.lost() };
                if let Err(error) = noted {
                    tracing::error!(error, "the VM is here, but its record could not be written");
                }
                place.settled();
            }
            Outcome::NotHere { .. } => place.discard(),
        }
    }

    fn noted(&mut self) -> Result<(), Reason> {
        Ok(self.registry.note_here(&self.vm)?)
    }
}

/// The state of a VM's QEMU at the destination.
pub(super) fn came_as(machine: &Machine) -> Found {
    match machine.qmp.run_state() {
        Ok(RunState::InMigrate | RunState::Paused | RunState::Prelaunch) | Err(_) => Found::Stopped,
        Ok(_) => Found::Runs,
    }
}
