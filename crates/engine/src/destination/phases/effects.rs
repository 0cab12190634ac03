//! Carries out the switchover's decisions at the destination: informs the source, runs the VM,
//! settles it, or ends its QEMU.

use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::qmp::QmpError;
use switchover::destination::{Effects, Event as Step, Outcome};
use switchover::{Doubt, Envelope, Reason};
use wire::{Cost, ToSource};

use crate::destination::lanes::ArrivingLanes;
use crate::host::{Arriving, NotAlone};
use crate::link::Link;

/// Holds the VM until it is decided who has it. If it is dropped before that, the VM is discarded.
pub(super) struct Keeper {
    machine: Arc<Machine>,
    held: Held,
    link: Arc<Link<ToSource>>,
    lanes: Arc<ArrivingLanes>,
    /// None before its QEMU has loaded it.
    loaded: Option<Loaded>,
}

/// The VM's claim on this host.
enum Held {
    /// It is not decided who has the VM.
    Undecided(Box<dyn Arriving>),
    /// The VM is here, or has died here. The agent may not have been able to record that yet.
    Here { arriving: Box<dyn Arriving>, is_noted: bool },
    /// The source has the VM, or the agent goes on.
    Released,
}

/// A VM that its QEMU has loaded.
pub(super) struct Loaded {
    pub(super) incoming: Arc<Incoming>,
    /// The cost of receiving it, without CPU time.
    pub(super) cost: Cost,
    /// None before it ran.
    pub(super) ran: Option<Instant>,
}

impl Held {
    fn arriving(&self) -> Option<&dyn Arriving> {
        match self {
            Self::Undecided(arriving) | Self::Here { arriving, .. } => Some(&**arriving),
            Self::Released => None,
        }
    }

    fn take(&mut self) -> Self {
        mem::replace(self, Self::Released)
    }

    /// The VM is here. Before the agent records that: after a fault there, the VM must not be
    /// discarded.
    fn decide_here(&mut self) {
        *self = match self.take() {
            Self::Undecided(arriving) => Self::Here { arriving, is_noted: false },
            decided => decided,
        };
    }
}

impl Keeper {
    pub(super) fn new(
        arriving: Box<dyn Arriving>,
        link: Arc<Link<ToSource>>,
        lanes: Arc<ArrivingLanes>,
    ) -> Self {
        Self {
            machine: arriving.machine(),
            held: Held::Undecided(arriving),
            link,
            lanes,
            loaded: None,
        }
    }

    /// QEMU has loaded the VM.
    pub(super) fn loaded(&mut self, loaded: Loaded, pool_high_water_bytes: u64) {
        let cost = Cost { pool_high_water_bytes, ..loaded.cost };
        self.loaded = Some(Loaded { cost, ..loaded });
    }

    pub(super) fn machine(&self) -> &Machine {
        &self.machine
    }

    pub(super) fn shared_machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    pub(super) fn images(&self) -> &[PreparedImage] {
        self.held.arriving().map_or(&[], |arriving| arriving.images())
    }

    pub(super) fn source_address(&self) -> Option<SocketAddr> {
        self.held.arriving()?.source_address()
    }

    /// Hands over to the agent, which settles the VM later: QEMU's incoming migration, and the VM
    /// if it is not decided who has it.
    pub(super) fn undecided(mut self) -> (Option<Arc<Incoming>>, Option<Box<dyn Arriving>>) {
        let incoming = self.loaded.take().map(|loaded| loaded.incoming);
        match self.held.take() {
            Held::Undecided(arriving) => (incoming, Some(arriving)),
            decided => {
                self.held = decided;
                (incoming, None)
            }
        }
    }

    /// Leaves the VM as it is: the agent continues from its journal.
    pub(super) fn leave(mut self) {
        mem::forget(self.held.take());
    }

    /// The VM is not run here, because of its former QEMU on this host.
    fn not_alone(&mut self, error: &NotAlone) -> Step {
        let reason = error.to_string().into();
        match error {
            NotAlone::Runs(_) => Step::ContFailed { reason, never_ran: true },
            NotAlone::Ran(_) if self.kill() => Step::QemuExited,
            NotAlone::MayLive(_) | NotAlone::Ran(_) => {
                Step::ContFailed { reason, never_ran: false }
            }
        }
    }

    fn send_cost(&self, loaded: &Loaded) {
        let sent = self.link.send(&ToSource::Cost(Cost {
            cpu_s: self.lanes.cpu().as_secs_f64(),
            ran_ms: loaded.ran.map_or(0.0, |ran| ran.elapsed().as_secs_f64() * 1e3),
            ..loaded.cost
        }));
        if let Err(error) = sent {
            tracing::debug!(%error, "cannot report what loading took");
        }
    }
}

impl Effects for Keeper {
    fn send(&mut self, said: &Envelope<switchover::ToSource>) {
        // A lost message is repeated, or requested.
        if let Err(error) = self.link.send(&ToSource::Switchover { said: said.clone() }) {
            tracing::info!(%error, "cannot send a switchover message");
        }
        if said.message == switchover::ToSource::Running
            && let Some(loaded) = &self.loaded
        {
            self.send_cost(loaded);
        }
    }

    fn cont(&mut self) -> Step {
        let Some(Loaded { incoming, ran, .. }) = &mut self.loaded else {
            return Step::ContFailed { reason: "it never waited for a VM".into(), never_ran: true };
        };
        // A QEMU that ended before it was ordered to run the VM never ran it: the VM goes on at its
        // source.
        if ran.is_none() && !self.machine.process.is_alive() {
            let reason = "its QEMU had ended before it was to run the VM".into();
            return Step::ContFailed { reason, never_ran: true };
        }
        let arriving = self.held.arriving();
        let ends_former = arriving.is_some_and(Arriving::ends_former);
        // From here on the former QEMU can't have the VM, if both have the same RAM or taps.
        if let Some(Err(error)) = arriving.map(Arriving::be_alone) {
            return self.not_alone(&error);
        }
        match incoming.cont() {
            Ok(()) => {
                ran.get_or_insert_with(Instant::now);
                if let Some(arriving) = arriving {
                    arriving.runs();
                }
                Step::Runs
            }
            Err(QmpError::Closed) if !self.machine.process.is_alive() => Step::QemuExited,
            Err(error) => {
                // Then there is no other QEMU that could go on: the next one is not ended.
                let never_ran = !ends_former && matches!(error, QmpError::Refused { .. });
                Step::ContFailed { reason: error.to_string().into(), never_ran }
            }
        }
    }

    fn settle(&mut self) {
        let Some(Loaded { incoming, ran, .. }) = &self.loaded else { return };
        if ran.is_some() {
            incoming.announce();
        } else {
            incoming.restore();
        }
    }

    fn kill(&mut self) -> bool {
        match self.machine.quit() {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "the QEMU of a VM that doesn't arrive can't be ended");
                false
            }
        }
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::warn!(?doubt, "in doubt");
    }

    fn done(&mut self, outcome: Outcome) {
        match outcome {
            // A VM that died here is shown as dead.
            Outcome::Here | Outcome::Lost { .. } => {
                self.held.decide_here();
                let Held::Here { arriving, is_noted } = &mut self.held else { return };
                let noted =
                    if outcome == Outcome::Here { arriving.adopt() } else { arriving.lost() };
                if let Err(error) = &noted {
                    tracing::error!(error, "the VM is here, but its record could not be written");
                }
                *is_noted = noted.is_ok();
            }
            Outcome::NotHere { reason } => {
                tracing::warn!(%reason, "the VM does not arrive");
                if let Held::Undecided(arriving) | Held::Here { arriving, .. } = self.held.take() {
                    arriving.discard();
                }
            }
        }
    }

    fn noted(&mut self) -> Result<(), Reason> {
        if let Held::Here { arriving, is_noted } = &mut self.held
            && !*is_noted
        {
            arriving.adopt()?;
            *is_noted = true;
        }
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        match self.held.take() {
            Held::Undecided(arriving) => arriving.discard(),
            Held::Here { arriving, .. } => arriving.settled(),
            Held::Released => {}
        }
    }
}
