//! A stream that is split: pages come by lanes, and the rest goes to QEMU once they are placed.

use std::mem;
use std::sync::Arc;

use placer::Feeder;
use qemu::ram_blocks::RamBlocks;
use wire::{Announced, ToSource};

use super::channels::Channels;
use super::{Carried, Incoming};
use crate::destination::nic_use::NicReports;
use crate::destination::phases::end::End;
use crate::destination::phases::receive::{Opened, Reach};
use crate::destination::phases::sharing::ContentSources;
use crate::resources::Pools;
use crate::tail::Tail;

/// A stream that is split. The feeder is dropped before the pools.
pub(super) struct Split {
    feeder: Feeder,
    pub(super) opened: Opened,
    pub(super) ram: RamBlocks,
    after_ram: AfterRam,
    _nic_reports: NicReports,
    pub(super) pools: Pools,
}

/// What becomes of the stream after RAM.
enum AfterRam {
    /// It is kept until all pages are placed.
    Kept(Tail),
    /// It goes to QEMU as it arrives.
    Fed,
}

impl Split {
    /// Whether QEMU gets the stream as it arrives.
    pub(super) fn is_fed(&self) -> bool {
        matches!(self.after_ram, AfterRam::Fed)
    }
}

impl Carried<'_> {
    /// Splits the stream, now that the block list is known: from here on lanes deliver pages.
    pub(super) fn split(
        &mut self,
        blocks: Vec<Announced>,
        (head, ram_section, footers): (&[u8], u32, bool),
    ) -> Result<(), End> {
        let connected = self.connected;
        let local = &connected.shared.local;
        let pools = local.resources.coming(false).map_err(End::failed)?;
        let socket = self.socket.try_clone().map_err(End::failed)?;
        let feeder = Feeder::start(socket, Arc::clone(&pools.pages)).map_err(End::failed)?;
        let syncs = self.channels.as_ref().and_then(Channels::syncs);
        if let Some(syncs) = syncs {
            let sections = Arc::clone(syncs);
            feeder.notify_sections(move || sections.one_more());
            // Setup and RAM's END are sections too.
            syncs.one_more();
            syncs.one_more();
        }
        feeder.head(head, ram_section, footers).map_err(End::failed)?;
        let ram = self.ram(&blocks);
        for text in ram.notes.iter().cloned() {
            connected.send(&ToSource::Note { text })?;
        }
        let nic_reports = NicReports::start(&connected.lanes, &connected.link);
        let reach = Reach { ram: &ram.reached, feeder: &feeder, audit: self.audit };
        let found = ContentSources::of(self.shares.clone(), self.disks.take());
        let opened = connected.open_lanes(&reach, blocks, found)?;
        let _nic_reports = nic_reports.map_err(End::failed)?;
        let after_ram = AfterRam::Kept(Tail::new(&local.resources.coming_tails));
        let split = Split { feeder, opened, ram, after_ram, _nic_reports, pools };
        self.incoming = Incoming::Split(Box::new(split));
        Ok(())
    }

    /// The RAM that can be written to directly.
    fn ram(&self, blocks: &[Announced]) -> RamBlocks {
        let listed = blocks.iter().map(|block| (block.name.as_str(), block.bytes));
        match &self.whose {
            Some(whose) => whose.ram(listed),
            None => RamBlocks {
                notes: vec![
                    "all RAM is placed inline: which process waits for the VM is not known, or \
                     the agent there may not see it"
                        .to_owned(),
                ],
                ..RamBlocks::default()
            },
        }
    }

    /// The stream after RAM: kept until everything before it is placed.
    pub(super) fn tail(&mut self, piece: &[u8]) -> Result<(), End> {
        let Incoming::Split(split) = &mut self.incoming else {
            return Err(End::failed("the tail of the stream arrived before its head"));
        };
        match &mut split.after_ram {
            AfterRam::Kept(tail) => tail.push(piece).map_err(End::failed),
            AfterRam::Fed => split.feeder.tail(piece).map_err(End::failed),
        }
    }

    /// All pages are placed. Compares them, and passes what follows RAM to QEMU.
    pub(super) fn placed(&mut self, totals: &[u64]) -> Result<(), End> {
        let Incoming::Split(split) = &mut self.incoming else {
            return Err(End::failed("pages arrived before the head of the stream"));
        };
        let AfterRam::Kept(tail) = mem::replace(&mut split.after_ram, AfterRam::Fed) else {
            return Err(End::failed("the stream was completed twice"));
        };
        let sharing = self.shares.as_ref().map(|shares| &shares.sharing);
        self.connected.prove_pages(&split.opened, totals, self.audit, sharing)?;
        // No thread may write to the VM's RAM while QEMU loads it.
        self.connected.lanes.end();
        if let Some(by_name) = &split.opened.by_name {
            // The source doesn't wait for slow disks, and has sent what is still being read.
            by_name.end_reading();
        }
        split.feeder.tail(tail.bytes()).map_err(End::failed)
    }
}
