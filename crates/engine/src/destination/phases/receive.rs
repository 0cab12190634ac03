//! Memory and disks of one VM that arrives, until its QEMU has loaded it.

use std::sync::Arc;

use dedup::destination::Blocks;
use placer::{BlockPlan, Feeder, Placement, Placer};
use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::ram_blocks::{RamBlocks, Reached};
use ram::Mapping;
use wire::{Announced, AuditOrder, Prepared, ToDestination, ToSource};

use super::effects::Keeper;
use super::load::Loading;
use super::sharing::{Found, Told, Wanted};
use super::{Arrival, End, SAID_MAX, ended, hex};
use crate::destination::by_name::ByName;
use crate::destination::disks::ArrivingDisks;
use crate::destination::nic_use::Telling;
use crate::link::Heard;
use crate::resources::Pools;

/// Most residue after RAM: what the devices of a large VM without VFIO make is
/// some MiB.
const TAIL_BYTES_MAX: usize = 256 << 20;

/// Where what comes of the VM goes.
struct Ends<'a> {
    ram: &'a [Reached],
    feeder: &'a Feeder,
    disks: Option<&'a ArrivingDisks>,
    is_audited: bool,
}

/// What lanes bring pages to, once the block list is known.
struct Opened {
    placer: Arc<Placer>,
    /// Of each block that is written directly.
    mappings: Vec<Option<Arc<Mapping>>>,
    by_name: Option<Arc<ByName>>,
}

/// What remains when all pages are placed.
struct Residue {
    tail: Vec<u8>,
    /// What the source compares by.
    audit: Vec<u64>,
}

impl Arrival<'_> {
    /// Everything of the VM, until its QEMU has loaded it.
    pub(super) fn receive(
        &self,
        keeper: &mut Keeper,
        machine: &Machine,
        disks: Option<&Arc<ArrivingDisks>>,
        pools: &Pools,
        wanted: Wanted,
    ) -> Result<(), End> {
        let audit = wanted.audit;
        let incoming = Arc::new(Incoming::of(machine).map_err(End::failed)?);
        keeper.incoming = Some(Arc::clone(&incoming));
        let stream = incoming.open().map_err(End::failed)?;
        let feeder = Feeder::start_within(stream, Arc::clone(&pools.pages)).map_err(End::failed)?;
        let feeder = Arc::new(feeder);
        let ram = RamBlocks::of(machine);
        let mut notes = ram.notes.clone();
        let Told { found, sharing, note, storage, storage_notes } = self.share(machine, wanted);
        notes.extend(note);
        let prepared = Prepared {
            token: hex(self.token),
            qemu: machine.version.clone(),
            notes,
            storage_notes,
            sharing,
            storage,
        };
        self.say(&ToSource::Prepared(prepared))?;

        let network = Arc::clone(&self.shared.local.resources.network);
        let telling = Telling::start(Arc::clone(&self.lanes), network, Arc::clone(&self.link));
        let telling = telling.map_err(End::failed)?;
        let mut opened = None;
        let kept = found.shares.as_ref().map(|shares| Arc::clone(&shares.sharing));
        let ends = Ends {
            ram: &ram.reached,
            feeder: &feeder,
            disks: disks.map(|disks| &**disks),
            is_audited: audit != AuditOrder::Off,
        };
        let residue = self.take_stream(&ends, found, &mut opened);
        // Threads that tell the source something must not keep it.
        let residue = residue.inspect_err(|_| self.link.cut_if_stuck(SAID_MAX))?;
        if let Some(Opened { placer, mappings, .. }) = &opened
            && let Some(ledger) = placer.ledger()
        {
            self.audit(ledger, mappings, &residue.audit, audit)?;
        }
        if let Some(by_name) = opened.as_ref().and_then(|opened| opened.by_name.as_ref()) {
            if let Some(sharing) = kept {
                sharing.keep(by_name);
            }
            keeper.fetched_bytes = by_name.fetched_bytes();
            keeper.again_bytes = by_name.again_bytes();
            keeper.stored = by_name.stored();
            for text in by_name.storage_notes() {
                self.say(&ToSource::Note { text })?;
            }
        }
        drop(opened);
        let (disks, lanes) = (disks.map(Arc::clone), Arc::clone(&self.lanes));
        let (wait, tail) = (self.shared.local.waits.load, residue.tail);
        self.load(machine, Loading { telling, disks, lanes, incoming, feeder, tail, wait })
    }

    /// Pages come by the lanes, residue comes here, until the source says that
    /// it is complete.
    fn take_stream(
        &self,
        ends: &Ends<'_>,
        found: Found,
        opened: &mut Option<Opened>,
    ) -> Result<Residue, End> {
        let Ends { feeder, disks, .. } = *ends;
        let (mut tail, mut found) = (Vec::new(), Some(found));
        let mut whole_bytes = 0;
        let mut announced = None;
        loop {
            match self.next()? {
                Heard::Message(ToDestination::Blocks { blocks, ram_section, footers }) => {
                    announced = Some((blocks, ram_section, footers));
                }
                Heard::Head(head) => {
                    let (blocks, ram_section, footers) = announced
                        .take()
                        .ok_or_else(|| End::failed("a head came without its block list"))?;
                    feeder.head(&head, ram_section, footers).map_err(End::failed)?;
                    *opened =
                        Some(self.open_lanes(ends, blocks, found.take().unwrap_or_default())?);
                }
                Heard::Tail(piece) => {
                    if tail.len() + piece.len() > TAIL_BYTES_MAX {
                        return Err(End::failed(format!(
                            "the VM's device state is larger than {} MiB",
                            TAIL_BYTES_MAX >> 20
                        )));
                    }
                    tail.extend_from_slice(&piece);
                }
                Heard::Whole(piece) => {
                    whole_bytes += piece.len() as u64;
                    feeder.whole(&piece).map_err(End::failed)?;
                }
                Heard::Message(ToDestination::Spare { pages }) => {
                    let by_name = opened.as_ref().and_then(|opened| opened.by_name.as_ref());
                    if let Some(by_name) = by_name {
                        by_name.spare(pages);
                    }
                }
                Heard::Message(ToDestination::FlushDisk { ticket, disk }) => match disks {
                    Some(disks) => disks.flush(ticket, disk).map_err(End::failed)?,
                    None => return Err(End::failed("a disk was to be flushed, and none comes")),
                },
                Heard::Message(ToDestination::Complete { residue_bytes, audit }) => {
                    let came = tail.len() as u64 + whole_bytes;
                    if residue_bytes != came {
                        return Err(End::failed(format!(
                            "{came} bytes of the non-RAM stream arrived, {residue_bytes} were sent"
                        )));
                    }
                    return Ok(Residue { tail, audit });
                }
                other => return Err(ended(other)),
            }
        }
    }

    /// Has the waiting QEMU take the disks that come with the VM.
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

    fn open_lanes(
        &self,
        ends: &Ends<'_>,
        blocks: Vec<Announced>,
        found: Found,
    ) -> Result<Opened, End> {
        let mut plans = Vec::with_capacity(blocks.len());
        for Announced { name, bytes } in blocks {
            let reached = ends.ram.iter().find(|ram| ram.name == name);
            let placement = match reached {
                Some(ram) if ram.bytes == bytes => Placement::Mapped(Arc::clone(&ram.mapping)),
                Some(ram) => {
                    return Err(End::failed(format!(
                        "RAM {name} has {bytes} bytes at the source and {} here; start both with \
                         the same -m and memory backends",
                        ram.bytes
                    )));
                }
                None => Placement::Inline,
            };
            plans.push(BlockPlan { name, bytes, placement });
        }
        let names = |mapped: bool| {
            let is = |plan: &&BlockPlan| matches!(plan.placement, Placement::Mapped(_)) == mapped;
            plans.iter().filter(is).map(|plan| plan.name.clone()).collect()
        };
        let said = ToSource::Placement { mapped: names(true), inline: names(false) };
        let mapping = |plan: &BlockPlan| match &plan.placement {
            Placement::Mapped(mapping) => Some(Arc::clone(mapping)),
            Placement::Inline => None,
        };
        let mappings: Vec<_> = plans.iter().map(mapping).collect();
        let mut held = Blocks::default();
        for (plan, mapping) in plans.iter().zip(&mappings) {
            held.push(plan.bytes, mapping.clone());
        }
        let placer = Placer::new(plans, ends.feeder.handle()).map_err(End::failed)?;
        let placer = if ends.is_audited { placer.audited().map_err(End::failed)? } else { placer };
        let placer = Arc::new(placer);
        let threads = self.lanes.threads();
        let admitted = found.admit(Arc::clone(&placer), held, threads).map_err(End::failed)?;
        let start = |stage| ByName::start(stage, Arc::clone(&self.link), threads).map(Arc::new);
        let by_name = admitted.map(start).transpose().map_err(End::failed)?;
        self.lanes.open(Arc::clone(&placer), by_name.clone());
        self.say(&said)?;
        Ok(Opened { placer, mappings, by_name })
    }
}
