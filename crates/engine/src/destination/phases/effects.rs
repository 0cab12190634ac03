//! Carries out the switchover's decisions at the destination: informs the source, runs the VM,
//! settles it, or ends its QEMU.

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
use crate::host::Arriving;
use crate::link::Link;

/// Holds the VM until it is decided who has it. If it is dropped before that, the VM is discarded.
pub(super) struct Keeper {
    machine: Arc<Machine>,
    arriving: Option<Box<dyn Arriving>>,
    adopted: bool,
    /// The VM is here, but the agent could not record that yet.
    unnoted: bool,
    link: Arc<Link<ToSource>>,
    lanes: Arc<ArrivingLanes>,
    /// None before its QEMU has loaded it.
    loaded: Option<Loaded>,
    /// None before it ran.
    ran: Option<Instant>,
    pool_high_water_bytes: u64,
}

/// A VM that its QEMU has loaded.
pub(super) struct Loaded {
    pub(super) incoming: Arc<Incoming>,
    /// The cost of pages sent by name.
    pub(super) cost: Cost,
}

impl Keeper {
    pub(super) fn new(
        arriving: Box<dyn Arriving>,
        link: Arc<Link<ToSource>>,
        lanes: Arc<ArrivingLanes>,
    ) -> Self {
        Self {
            machine: arriving.machine(),
            arriving: Some(arriving),
            adopted: false,
            unnoted: false,
            link,
            lanes,
            loaded: None,
            ran: None,
            pool_high_water_bytes: 0,
        }
    }

    /// QEMU has loaded the VM.
    pub(super) fn loaded(&mut self, loaded: Loaded, pool_high_water_bytes: u64) {
        self.loaded = Some(loaded);
        self.pool_high_water_bytes = pool_high_water_bytes;
    }

    pub(super) fn machine(&self) -> &Machine {
        &self.machine
    }

    pub(super) fn shared_machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    pub(super) fn images(&self) -> &[PreparedImage] {
        self.arriving.as_ref().map_or(&[], |arriving| arriving.images())
    }

    pub(super) fn source_address(&self) -> Option<SocketAddr> {
        self.arriving.as_ref()?.source_address()
    }

    /// Hands over to the agent, which settles the VM later: QEMU's incoming migration, and the VM
    /// if it is not decided who has it.
    pub(super) fn undecided(mut self) -> (Option<Arc<Incoming>>, Option<Box<dyn Arriving>>) {
        let undecided = if self.adopted { None } else { self.arriving.take() };
        (self.loaded.take().map(|loaded| loaded.incoming), undecided)
    }

    /// Leaves the VM as it is: the agent continues from its journal.
    pub(super) fn leave(mut self) {
        std::mem::forget(self.arriving.take());
    }

    fn say_cost(&self, by_name: Cost) {
        let said = self.link.say(&ToSource::Cost(Cost {
            cpu_s: self.lanes.cpu().as_secs_f64(),
            pool_high_water_bytes: self.pool_high_water_bytes,
            ran_ms: self.ran.map_or(0.0, |ran| ran.elapsed().as_secs_f64() * 1e3),
            ..by_name
        }));
        if let Err(error) = said {
            tracing::debug!(%error, "cannot report what loading took");
        }
    }
}

impl Effects for Keeper {
    fn send(&mut self, said: &Envelope<switchover::ToSource>) {
        // A lost message is repeated, or requested.
        if let Err(error) = self.link.say(&ToSource::Switchover { said: said.clone() }) {
            tracing::info!(%error, "cannot send a switchover message");
        }
        if said.message == switchover::ToSource::Running
            && let Some(loaded) = &self.loaded
        {
            self.say_cost(loaded.cost);
        }
    }

    fn cont(&mut self) -> Step {
        let Some(Loaded { incoming, .. }) = &self.loaded else {
            return Step::ContFailed { reason: "it never waited for a VM".into(), never_ran: true };
        };
        // A QEMU that ended before it was ordered to run the VM never ran it: the VM goes on at its
        // source.
        if self.ran.is_none() && !self.machine.process.is_alive() {
            let reason = "its QEMU had ended before it was to run the VM".into();
            return Step::ContFailed { reason, never_ran: true };
        }
        let ends_former = self.arriving.as_ref().is_some_and(|arriving| arriving.ends_former());
        // From here on the former QEMU can't have the VM, if both have the same RAM or taps.
        if let Some(Err(reason)) = self.arriving.as_ref().map(|arriving| arriving.be_alone()) {
            return Step::ContFailed { reason: reason.into(), never_ran: false };
        }
        match incoming.cont() {
            Ok(()) => {
                self.ran.get_or_insert_with(Instant::now);
                if let Some(arriving) = &self.arriving {
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
        let Some(Loaded { incoming, .. }) = &self.loaded else { return };
        if self.ran.is_some() {
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
                self.adopted = true;
                let is_here = outcome == Outcome::Here;
                let noted = self.arriving.as_mut().map(|arriving| match is_here {
                    true => arriving.adopt(),
                    false => arriving.lost(),
                });
                if let Some(Err(error)) = noted {
                    self.unnoted = true;
                    tracing::error!(error, "the VM is here, but its record could not be written");
                }
            }
            Outcome::NotHere { reason } => {
                tracing::warn!(%reason, "the VM does not arrive");
                if let Some(arriving) = self.arriving.take() {
                    arriving.discard();
                }
            }
        }
    }

    fn noted(&mut self) -> Result<(), Reason> {
        let Some(arriving) = self.arriving.as_mut().filter(|_| self.unnoted) else { return Ok(()) };
        arriving.adopt()?;
        self.unnoted = false;
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        match self.arriving.take() {
            Some(arriving) if !self.adopted => arriving.discard(),
            Some(arriving) => arriving.settled(),
            None => {}
        }
    }
}
