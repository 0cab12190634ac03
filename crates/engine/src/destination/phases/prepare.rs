//! Prepares a QEMU that waits for the VM and the receivers of its stream, and notifies the source.

use std::net::SocketAddr;
use std::sync::Arc;

use placer::Feeder;
use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::ram_blocks::{RamBlocks, Reached};
use switchover::MigrationId;
use switchover::destination::Driver;
use switchover::journal::{Listed, Opened};
use wire::{Prepare, ToSource};

use super::audit::Auditing;
use super::connect::{Connected, SILENCE, hex};
use super::effects::Keeper;
use super::end::End;
use super::sharing::{ContentSources, PagesOrder, PagesReport, Shares};
use crate::destination::disks::ArrivingDisks;
use crate::destination::nic_use::NicReports;
use crate::resources::Pools;

/// Ready for the source's stream. The reporting thread is dropped first, and QEMU last.
pub(super) struct Prepared<'a, 's> {
    pub(super) connected: &'a Connected<'s>,
    pub(super) machine: &'a Machine,
    /// How pages that are sent by name are found.
    pub(super) found: ContentSources,
    pub(super) nic_reports: NicReports,
    /// None: no disks move.
    pub(super) disks: Option<Arc<ArrivingDisks>>,
    /// RAM that is written directly.
    pub(super) ram: Vec<Reached>,
    pub(super) feeder: Arc<Feeder>,
    pub(super) incoming: Arc<Incoming>,
    pub(super) audit: Auditing,
    /// Whether QEMU has mapped the RAM that its former one has: it loads nothing before that one
    /// has released it.
    pub(super) maps_ram: bool,
}

impl<'s> Connected<'s> {
    /// Creates the journal: from here on a restarted agent knows of the migration.
    pub(super) fn open_journal(
        &self,
        order: &Prepare,
        keeper: &Keeper,
        handed_over: bool,
    ) -> Result<Driver, End> {
        let qemu = serde_json::to_value(keeper.machine().record()).map_err(End::failed)?;
        let seen = SocketAddr::new(self.peer.ip(), order.agent_port);
        let peer_address = match self.shared.same_host {
            true => Opened::SAME_HOST.to_owned(),
            false => keeper.source_address().unwrap_or(seen).to_string(),
        };
        let opened = Opened {
            migration: order.switchover.clone(),
            vm: order.vm.clone(),
            peer: order.from.clone(),
            peer_address,
            run: false,
            qemu,
            // It comes from the peer; without a valid one the switchover's own id is logged.
            listed: MigrationId::new(&order.migration).ok().map(Listed::now),
            handed_over,
        };
        self.shared.local.journals.create(opened).map(Driver::new).map_err(End::failed)
    }

    /// Makes the waiting QEMU receive the disks that move with the VM.
    pub(super) fn open_disks(
        &self,
        machine: &Machine,
        images: &[PreparedImage],
        pools: &Pools,
    ) -> Result<Option<ArrivingDisks>, End> {
        if images.is_empty() {
            return Ok(None);
        }
        let Some(pool) = &pools.blocks else {
            return Err(End::failed("images were prepared for a VM that moves without disks"));
        };
        let local = &self.shared.local;
        let socket = local.scratch.join(format!("disks-{}.sock", hex(self.token)));
        let link = Arc::clone(&self.link);
        let room = (pool, pools.block_room());
        let disks = ArrivingDisks::open(machine, &socket, images, room, link, &self.lanes)
            .map_err(End::failed)?;
        self.lanes.with_disks(disks.sink());
        Ok(Some(disks))
    }

    /// Makes QEMU wait for the stream, and notifies the source.
    pub(super) fn prepare<'a>(
        &'a self,
        machine: &'a Machine,
        disks: Option<&Arc<ArrivingDisks>>,
        pools: &Pools,
        mut wanted: PagesOrder,
    ) -> Result<Prepared<'a, 's>, End> {
        let (audit, maps_ram) = (wanted.audit, wanted.maps_ram);
        let incoming = if maps_ram { Incoming::mapped(machine) } else { Incoming::of(machine) };
        let incoming = Arc::new(incoming.map_err(End::failed)?);
        let stream = incoming.open().map_err(End::failed)?;
        let feeder = Feeder::start(stream, Arc::clone(&pools.pages)).map_err(End::failed)?;
        let waits = &self.shared.local.waits;
        feeder.give_up_after(SILENCE * waits.stall.max(waits.load)).map_err(End::failed)?;
        let feeder = Arc::new(feeder);
        let mut notes = std::mem::take(&mut wanted.notes);
        let RamBlocks { reached: ram, notes: of_ram } = RamBlocks::of(machine);
        notes.extend(of_ram);
        let shares = wanted.sharing.shares.as_ref();
        let names_with_bodies = shares.is_some_and(Shares::names_with_bodies);
        let PagesReport { found, sharing, note, storage, storage_notes } =
            self.share(machine, wanted);
        notes.extend(note);
        let prepared = wire::Prepared {
            token: hex(self.token),
            qemu: machine.version.clone(),
            notes,
            storage_notes,
            sharing,
            storage,
            hash: audit.chosen(),
            deltas: true,
            names_with_bodies,
        };
        self.send(&ToSource::Prepared(prepared))?;
        let nic_reports = NicReports::start(&self.lanes, &self.link).map_err(End::failed)?;
        let disks = disks.map(Arc::clone);
        let connected = self;
        Ok(Prepared {
            connected,
            machine,
            found,
            nic_reports,
            disks,
            ram,
            feeder,
            incoming,
            audit,
            maps_ram,
        })
    }
}
