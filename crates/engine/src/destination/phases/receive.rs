//! Receives memory and disks of a VM, until everything is delivered.

use std::sync::Arc;
use std::time::Duration;

use dedup::destination::{Blocks, Sharing};
use placer::{BlockPlan, Feeder, Placement, Placer};
use qemu::ram_blocks::Reached;
use ram::Mapping;
use wire::{Announced, Cost, ToDestination, ToSource};

use super::audit::Auditing;
use super::connect::Connected;
use super::end::{End, ended};
use super::prepare::Prepared;
use super::sharing::ContentSources;
use crate::destination::by_name::ByName;
use crate::destination::lanes::Memory;
use crate::link::Received;
use crate::tail::Tail;
use crate::waits::Silence;

/// The time in which a source that reads has accepted what is being written.
const SAID_MAX: Duration = Duration::from_millis(100);
/// The fewest bytes of a tail that count as data.
const TAIL_LEAST: u64 = 64 << 10;

/// The means by which pages are placed.
pub(super) struct Reach<'a> {
    pub(super) ram: &'a [Reached],
    pub(super) feeder: &'a Feeder,
    pub(super) audit: Auditing,
}

/// The receivers of the lanes' pages, once the block list is known.
pub(super) struct Opened {
    pub(super) placer: Arc<Placer>,
    /// For each block, its mapping if it is written directly.
    pub(super) mappings: Vec<Option<Arc<Mapping>>>,
    /// None: no pages are sent by name.
    pub(super) by_name: Option<Arc<ByName>>,
}

impl Opened {
    /// The source could send this many of the pages for which disks are read.
    pub(super) fn spare(&self, pages: u64) {
        if let Some(by_name) = &self.by_name {
            by_name.spare(pages);
        }
    }

    /// The cost of pages sent by name.
    pub(super) fn cost(&self) -> Cost {
        self.by_name.as_ref().map(|by_name| by_name.cost()).unwrap_or_default()
    }
}

/// What is received while QEMU streams.
struct Streamed {
    /// None before the block list is received, or if the stream is passed through whole.
    opened: Option<Opened>,
    tail: Tail,
    whole_bytes: u64,
}

impl Streamed {
    /// A measure of what has arrived here. A tail grows by much at a time: byte by byte it would be
    /// a way to keep an arrival's resources for nothing.
    fn arrived(&self) -> u64 {
        self.whole_bytes + self.tail.bytes().len() as u64 / TAIL_LEAST
    }
}

/// The whole VM is here, according to the source.
pub(super) struct Delivered<'a, 's> {
    /// None: the stream was passed through whole.
    pub(super) opened: Option<Opened>,
    /// The non-RAM stream's tail, for when all pages are placed.
    pub(super) tail: Tail,
    /// The source's totals for the audit.
    pub(super) totals: Vec<u64>,
    /// None: its content is not shared.
    pub(super) sharing: Option<Arc<Sharing>>,
    pub(super) prepared: Prepared<'a, 's>,
}

impl<'a, 's> Prepared<'a, 's> {
    /// Receives pages by the lanes and the non-RAM stream here, until the source reports that it is
    /// complete.
    pub(super) fn take_stream(mut self) -> Result<Delivered<'a, 's>, End> {
        let tail = Tail::new(&self.connected.shared.local.resources.coming_tails);
        let mut streamed = Streamed { opened: None, tail, whole_bytes: 0 };
        let sharing = self.found.shares.as_ref().map(|shares| Arc::clone(&shares.sharing));
        match self.receive_stream(&mut streamed) {
            Ok(totals) => {
                let Streamed { opened, tail, .. } = streamed;
                Ok(Delivered { opened, tail, totals, sharing, prepared: self })
            }
            Err(end) => {
                // Threads that write to the source must not block this one.
                self.connected.link.cut_if_stuck(SAID_MAX);
                drop(streamed);
                Err(end)
            }
        }
    }

    /// Receives the stream; returns the source's totals for the audit.
    fn receive_stream(&mut self, streamed: &mut Streamed) -> Result<Vec<u64>, End> {
        let (mut announced, mut silence) = (None, Silence::new());
        loop {
            match self.connected.next_while(&mut silence, streamed.arrived())? {
                Received::Message(ToDestination::Blocks { blocks, ram_section, footers }) => {
                    announced = Some((blocks, ram_section, footers));
                }
                Received::Head(head) => {
                    let (blocks, ram_section, footers) = announced.take().ok_or_else(|| {
                        End::failed("the head of the stream arrived without its block list")
                    })?;
                    self.feeder.head(&head, ram_section, footers).map_err(End::failed)?;
                    let found = std::mem::take(&mut self.found);
                    let reach = Reach { ram: &self.ram, feeder: &self.feeder, audit: self.audit };
                    streamed.opened = Some(self.connected.open_lanes(&reach, blocks, found)?);
                }
                Received::Tail(_) if streamed.opened.is_none() => {
                    return Err(End::failed("the tail of the stream arrived before its head"));
                }
                Received::Tail(piece) => streamed.tail.push(&piece).map_err(End::failed)?,
                Received::Whole(piece) if self.maps_ram => {
                    streamed.tail.push(&piece).map_err(End::failed)?;
                }
                Received::Whole(piece) => {
                    streamed.whole_bytes += piece.len() as u64;
                    let fed = self.feeder.whole(&piece);
                    fed.map_err(|error| End::failed(self.incoming.explain(&error)))?;
                }
                Received::Message(ToDestination::Spare { pages }) => {
                    if let Some(opened) = &streamed.opened {
                        opened.spare(pages);
                    }
                }
                Received::Message(ToDestination::FlushDisk { ticket, disk }) => match &self.disks {
                    Some(disks) => disks.flush(ticket, disk).map_err(End::failed)?,
                    None => return Err(End::failed("a disk was to be flushed, and no disk moves")),
                },
                Received::Message(ToDestination::Complete { residue_bytes, audit }) => {
                    let came = streamed.tail.bytes().len() as u64 + streamed.whole_bytes;
                    if residue_bytes != came {
                        return Err(End::failed(format!(
                            "{came} bytes of the non-RAM stream arrived, {residue_bytes} were sent"
                        )));
                    }
                    return Ok(audit);
                }
                other => return Err(ended(other)),
            }
        }
    }
}

impl Connected<'_> {
    /// Opens the lanes for pages.
    pub(super) fn open_lanes(
        &self,
        reach: &Reach<'_>,
        blocks: Vec<Announced>,
        found: ContentSources,
    ) -> Result<Opened, End> {
        let Reach { ram, feeder, audit } = *reach;
        let mut plans = Vec::with_capacity(blocks.len());
        for Announced { name, bytes } in blocks {
            let reached = ram.iter().find(|ram| ram.name == name);
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
            held.push(plan.name.clone(), plan.bytes, mapping.clone());
        }
        let placer = Placer::new(plans, feeder.handle()).map_err(End::failed)?;
        let placer = Arc::new(audit.of_placer(placer)?);
        let threads = self.lanes.threads();
        let reads_nothing = found.reads_for_mapped_only() && mappings.iter().all(Option::is_none);
        let memory = &self.shared.local.resources.named;
        let admitted = found.admit(Arc::clone(&placer) as _, held, threads, memory);
        let admitted = admitted.map_err(End::failed)?;
        let start = |stage| ByName::start(stage, Arc::clone(&self.link), threads).map(Arc::new);
        let by_name = admitted.map(start).transpose().map_err(End::failed)?;
        self.lanes.open(Memory::Qemu(Arc::clone(&placer)), by_name.clone());
        self.send(&said)?;
        if reads_nothing {
            let text =
                "no page is read from storage: all RAM is placed inline, and content is shared";
            self.send(&ToSource::Note { text: text.to_owned() })?;
        }
        Ok(Opened { placer, mappings, by_name })
    }
}
