//! The destination checks the order and starts a waiting QEMU, while QEMU here is set up
//! for its migration; then a journal is opened.

use std::sync::Arc;
use std::time::Instant;

use ::audit::Hash;
use dedup::source::StorageNotes;
use qemu::command_line::{check_overrides, parse_override};
use qemu::disks::{Allowed, Cleanup};
use qemu::qmp::QmpError;
use qemu::ram_blocks::RamBlocks;
use qemu::shape::Device;
use switchover::journal::Opened;
use switchover::source::{Driver, Event as Step};
use switchover::{MigrationId, Reason};
use wire::{Prepare, ToDestination, ToSource};

use super::connect::Connected;
use super::description::Description;
use super::journaled::{Journaled, Reversible};
use super::listening::{Happening, Listening};
use super::start::SetUp;
use super::{Ended, Failed, Undo};
use crate::error::MigrationError;
use crate::source::audit;
use crate::source::bounds::sched_params;
use crate::source::context::local;
use crate::source::disks::Chosen;
use crate::source::from_disks::FromDisks;

/// The order sent to the destination, and related state.
struct Order {
    id: MigrationId,
    ram: RamBlocks,
    /// None: no page is read from the VM's disks.
    storage: Option<FromDisks>,
    /// The VM's devices.
    devices: Vec<Device>,
    /// None: no disk moves.
    chosen: Option<Chosen>,
    /// Removes the challenge files next to the images when dropped.
    challenges: Cleanup,
}

impl Order {
    fn moves_disks(&self) -> bool {
        self.chosen.as_ref().is_some_and(|chosen| !chosen.disks.is_empty())
    }
}

/// The destination has its order, and QEMU here is set up for its migration.
pub(crate) struct Ordered<'m> {
    connected: Connected<'m>,
    order: Order,
    set_up: SetUp,
}

/// The destination's QEMU waits for the VM.
pub(crate) struct Prepared<'m> {
    pub(crate) connected: Connected<'m>,
    pub(crate) id: MigrationId,
    /// The destination's answer.
    pub(crate) there: wire::Prepared,
    pub(crate) ram: RamBlocks,
    /// None: no page is read from the VM's disks.
    pub(crate) storage: Option<FromDisks>,
    /// None: no disk moves.
    pub(crate) chosen: Option<Chosen>,
}

impl<'m> Connected<'m> {
    /// Orders the destination to check and to start a waiting QEMU.
    pub(crate) fn order(self, description: Description) -> Result<Ordered<'m>, Failed<'m>> {
        let ordered = self.say_order(description).and_then(|order| {
            let set_up = self.set_up(&order.devices, order.moves_disks())?;
            Ok((order, set_up))
        });
        match ordered {
            Ok((order, set_up)) => Ok(Ordered { connected: self, order, set_up }),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    fn say_order(&self, description: Description) -> Result<Order, MigrationError> {
        let Description { shape, chosen, files, cleanup: challenges } = description;
        let context = &self.context;
        let (request, machine) = (context.request, &context.vm.machine);
        let migration = context.report_builder.watch().progress().1.id;
        let devices = shape.devices.clone();
        let id = MigrationId::random().map_err(|error| local("making a random id", error))?;
        let order = Prepare {
            migration,
            switchover: id.clone(),
            agent_port: context.local.agent_port,
            from: context.local.agent.clone(),
            vm: context.vm.name.clone(),
            argv: machine.argv.clone(),
            cwd: context.vm.cwd.clone(),
            overrides: overrides(&request.set)?,
            qemu: machine.version.clone(),
            shape: shape.into(),
            disks: files.into(),
            shared_disks: request.shared_disks,
            moving: chosen.as_ref().map_or_else(Vec::new, |chosen| chosen.moving.clone()).into(),
            allowed: Allowed { create: request.create_disks, overwrite: request.overwrite_disks }
                .into(),
            incoming_qmp: request.incoming_qmp.clone(),
            overcommit: request.overcommit_memory,
            accept_missing_taps: request.accept_missing_taps,
            terms: sched_params(&context.report_builder.watch().bounds(), false),
            sharing: self.sharing(),
            storage: None,
            share_domain: self.domain(),
            guest_port: self.context.vm.machine.guest_port,
            audit: audit::ordered(request.audit),
            hashes: Hash::offered(),
        };
        let ram = RamBlocks::of(&self.context.vm.machine);
        let moving = chosen.as_ref().map_or(&[][..], |chosen| &chosen.disks);
        let storage = self.query_guest(&ram, moving);
        let read = storage.as_ref().map(|storage| storage.order.clone());
        self.send(&ToDestination::Prepare(Box::new(Prepare { storage: read, ..order })))?;
        Ok(Order { id, ram, storage, devices, chosen, challenges })
    }
}

impl<'m> Ordered<'m> {
    /// Waits while the destination starts its QEMU.
    pub(crate) fn wait_prepared(mut self) -> Result<(Prepared<'m>, SetUp), Failed<'m>> {
        let report_builder = Arc::clone(&self.connected.context.report_builder);
        let waits_for =
            format!("{} to check the VM and start its QEMU", self.connected.context.peer.name);
        report_builder.watch().update(|progress| progress.waits_for = Some(waits_for));
        let prepared = self.connected.receive_prepared();
        report_builder.watch().update(|progress| progress.waits_for = None);
        let there = match prepared {
            Ok(there) => there,
            Err(error) => return Err(Failed::new(self, error)),
        };
        let moves_disks = self.order.moves_disks();
        let Self { connected, order: Order { id, ram, storage, chosen, .. }, set_up } = self;
        let chosen = chosen.filter(|_| moves_disks).map(Chosen::answered);
        connected.note_prepared(&there, storage.as_ref().map(|storage| &*storage.notes));
        let storage = storage.and_then(|storage| storage.if_read(&there.storage));
        Ok((Prepared { connected, id, there, ram, storage, chosen }, set_up))
    }
}

impl Connected<'_> {
    fn receive_prepared(&mut self) -> Result<wire::Prepared, MigrationError> {
        let until = Instant::now() + self.context.local.waits.prepare;
        loop {
            match self.next(until)? {
                Happening::Peer(ToSource::Prepared(prepared)) => return Ok(prepared),
                Happening::Peer(other) => return Err(self.unexpected(&other)),
                Happening::Said(said) => return Err(self.said_early(&said)),
                Happening::Qemu(event) => {
                    if self.follow(&event)? {
                        self.stopped(event.at, Default::default());
                    }
                }
                Happening::Notice(_) => {}
            }
        }
    }

    fn note_prepared(&self, there: &wire::Prepared, storage: Option<&StorageNotes>) {
        let Self { context, .. } = self;
        let (machine, report_builder) = (&context.vm.machine, &context.report_builder);
        for note in machine.notes.iter().chain(&there.notes) {
            report_builder.note(note);
        }
        if let Some(notes) = storage {
            there.storage_notes.iter().for_each(|note| notes.note(note));
        }
        let theirs = Reason::new(there.qemu.as_str()).into();
        let qemu = [machine.version.clone(), theirs];
        let prepare_s = report_builder.elapsed_s();
        report_builder.update(|report| {
            report.qemu = qemu;
            report.prepare_s = prepare_s;
        });
    }
}

impl<'m> Prepared<'m> {
    /// From here on the agent finds the migration after a restart.
    pub(crate) fn open_journal(self) -> Result<Journaled<Prepared<'m>>, Failed<'m>> {
        match self.journal() {
            Ok(driver) => Ok(Journaled::new(self, driver)),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    fn journal(&self) -> Result<Driver, MigrationError> {
        let context = &self.connected.context;
        let qemu = serde_json::to_value(context.vm.machine.record())
            .map_err(|error| local("describing the VM's QEMU", error.into()))?;
        let peer_address = match context.is_within_host() {
            true => Opened::SAME_HOST.to_owned(),
            false => context.peer.address.to_string(),
        };
        let passes_taps = context.is_within_host() && context.vm.machine.passes_taps();
        let opened = Opened {
            migration: self.id.clone(),
            vm: context.vm.name.clone(),
            peer: context.peer.name.clone(),
            peer_address,
            run: context.was_running,
            qemu,
            listed: context.report_builder.listed(),
            handed_over: context.vm.hand_over.is_some() || passes_taps,
        };
        let journal = context.local.journals.create(opened);
        let journal =
            journal.map_err(|error| local("opening its journal", std::io::Error::other(error)))?;
        Ok(Driver::new(journal))
    }
}

/// Nothing streams yet.
impl<'m> Reversible<'m> for Prepared<'m> {
    fn connected(&self) -> &Connected<'m> {
        &self.connected
    }

    fn connected_mut(&mut self) -> &mut Connected<'m> {
        &mut self.connected
    }

    fn let_go(&mut self) {
        self.connected.control.cut_if_stuck();
    }

    fn await_completed(&self) -> Step {
        Step::NotCompleted { reason: "its migration never started".into() }
    }

    fn back_out(&mut self, _: bool) -> Result<(), QmpError> {
        self.let_go();
        Ok(())
    }

    fn finish(&mut self) {}

    fn abandon(&mut self) {
        self.let_go();
    }

    fn account_disks(&self) {}

    fn account(&self) {}
}

impl Undo for Ordered<'_> {
    fn undo(self: Box<Self>, error: &MigrationError) -> Ended {
        let Self { connected, order: Order { storage, chosen, challenges, .. }, set_up } = *self;
        // This removes the challenge files and restores QEMU's settings at once.
        drop((chosen, challenges, set_up));
        let ended = Box::new(connected).undo(error);
        drop(storage);
        ended
    }
}

impl Undo for Prepared<'_> {
    fn undo(self: Box<Self>, error: &MigrationError) -> Ended {
        let Self { connected, storage, .. } = *self;
        let ended = Box::new(connected).undo(error);
        drop(storage);
        ended
    }
}

fn overrides(set: &[String]) -> Result<Vec<(String, String)>, MigrationError> {
    let parsed: Result<Vec<_>, _> = set.iter().map(|one| parse_override(one)).collect();
    let overrides = parsed?;
    check_overrides(&overrides)?;
    Ok(overrides)
}
