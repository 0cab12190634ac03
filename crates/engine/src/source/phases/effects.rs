//! What the switchover has done at the source: say, wait for QEMU, let the VM
//! go on, or end it.

use std::time::Instant;

use api::Phase;
use qemu::qmp::QmpError;
use switchover::journal::Opened;
use switchover::source::{Driver, Effects, Event as Step, Outcome as Fate};
use switchover::{Doubt, Envelope, MigrationId};
use wire::ToDestination;

use super::stream::local;
use crate::error::MigrationError;
use crate::source::Source;

impl Source<'_> {
    /// From here on a restart of the agent knows of the migration.
    pub(crate) fn open_journal(&mut self) -> Result<(), MigrationError> {
        let qemu = serde_json::to_value(self.vm.machine.record())
            .map_err(|error| local("describing the VM's QEMU", error.into()))?;
        let opened = Opened {
            migration: self.switchover_id()?,
            vm: self.vm.name.clone(),
            peer: self.peer.name.clone(),
            peer_address: self.peer.address.to_string(),
            run: self.was_running,
            qemu,
        };
        let journal = self.local.journals.create(opened);
        let journal =
            journal.map_err(|error| local("opening its journal", std::io::Error::other(error)))?;
        self.driver = Some(Driver::new(journal));
        Ok(())
    }

    pub(crate) fn switchover_id(&mut self) -> Result<MigrationId, MigrationError> {
        if let Some(id) = &self.switchover {
            return Ok(id.clone());
        }
        let id = MigrationId::random().map_err(|error| local("making a random id", error))?;
        Ok(self.switchover.insert(id).clone())
    }

    /// Tells the switchover, if it has begun, and does what follows.
    pub(crate) fn step(&mut self, event: Step) {
        let Some(mut driver) = self.driver.take() else { return };
        driver.step(event, self);
        if driver.machine().doubt().is_none() {
            self.doubt = None;
        }
        self.driver = Some(driver);
    }
}

impl Effects for Source<'_> {
    fn say(&mut self, said: &Envelope<switchover::ToDestination>) {
        if matches!(said.message, switchover::ToDestination::Go { .. }) && !self.committed {
            self.committed = true;
            self.report_builder.enter(Phase::Committed);
        }
        // What is lost is said again, or asked for.
        if let Err(error) = self.send(&ToDestination::Switchover { said: said.clone() }) {
            tracing::info!(vm = self.vm.name, %error, "not said");
        }
    }

    /// A QEMU that ends `failed` or `cancelled` runs the VM again by itself:
    /// only one that says `completed` and `postmigrate` has let go of it.
    fn await_completed(&mut self) -> Step {
        let Some(stream) = &self.stream else {
            return Step::NotCompleted { reason: "its migration never began".into() };
        };
        let left = self.blackout_ends().map(|end| end.saturating_duration_since(Instant::now()));
        let wait =
            left.map_or(self.local.waits.complete, |left| left.min(self.local.waits.complete));
        match stream.outgoing.wait_completed(wait) {
            Ok(()) => Step::Completed,
            Err(QmpError::Closed) => Step::QemuGone,
            Err(error) => Step::NotCompleted { reason: error.to_string().into() },
        }
    }

    fn go_on(&mut self, run: bool) -> Step {
        self.account_disks();
        self.let_go();
        // Before QEMU's migration: one that waits for a disk can't be cancelled.
        if let Some(disks) = &mut self.disks {
            disks.undo();
        }
        let backed_out = self.back_out(run);
        // With the VM running there is time to wait for threads.
        self.stop_stream(false);
        self.disks = None;
        match backed_out {
            Ok(()) => Step::WentOn,
            Err(_) if !self.vm.machine.process.is_alive() => Step::QemuGone,
            Err(error) => Step::CannotGoOn { reason: error.to_string().into() },
        }
    }

    fn quit(&mut self) -> bool {
        self.stop_stream(true);
        self.account_disks();
        self.disks = None;
        match self.vm.machine.quit() {
            Ok(()) => true,
            Err(error) => {
                self.report_builder.note(format!("the source's QEMU does not end: {error}"));
                false
            }
        }
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        tracing::error!(advice = doubt.advice(&self.vm.name, &self.peer.name), "in doubt");
        self.doubt = Some(doubt.clone());
    }

    fn done(&mut self, fate: Fate) {
        self.fate = Some(fate);
    }
}
