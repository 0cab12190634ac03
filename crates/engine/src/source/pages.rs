//! The pages of a stream on their path from the tap to the lanes, whoever commands QEMU.

use std::sync::Arc;

use audit::HandedOver;
use data_threads::DataThreads;
use dedup::source::{Naming, after};
use page::{Batch, PAGE_BYTES};
use tap::{Head, Stopped};
use wire::{Announced, ToDestination};

use super::control::stream_state::StreamState;
use super::lanes::Lanes;
use crate::link::Link;

/// What each page that QEMU hands over passes, or is noted in.
pub(crate) struct Pages {
    pub(crate) state: Arc<StreamState>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) link: Arc<Link<ToDestination>>,
    pub(crate) handed_over: Arc<HandedOver>,
    /// None: pages don't go by name.
    pub(crate) naming: Option<Arc<Naming>>,
    pub(crate) threads: Arc<DataThreads>,
}

impl Pages {
    /// QEMU has announced its RAM: all that numbers blocks learns of them, and the destination.
    pub(crate) fn announce(&self, head: Head) -> Result<(), Stopped> {
        let Head { bytes, blocks, ram_section, footers, epoch_by_section, .. } = head;
        self.state.announce_ram(blocks.iter().map(|block| block.bytes).sum(), epoch_by_section);
        self.handed_over.announce(blocks.iter().map(|block| block.bytes / PAGE_BYTES as u64));
        let announced = |block: tap::Block| Announced { name: block.name, bytes: block.bytes };
        let blocks: Vec<Announced> = blocks.into_iter().map(announced).collect();
        if let Some(naming) = &self.naming {
            naming.announce(&blocks, epoch_by_section);
        }
        if let Some(deltas) = self.lanes.deltas() {
            deltas.announce(&blocks);
        }
        let said = ToDestination::Blocks { blocks, ram_section, footers };
        self.link.say(&said).and_then(|()| self.link.head(bytes)).map_err(|_| Stopped)
    }

    /// The bodies of a batch from number `first` on have been read.
    pub(crate) fn arrived(&self, batch: &Batch, first: usize) {
        self.handed_over.bodies(batch, &batch.bodies()[first..], after(batch.epoch));
    }

    /// QEMU has handed over a batch.
    pub(crate) fn took(&self, batch: &mut Batch) {
        batch.epoch = after(batch.epoch);
        self.state.took(batch);
        self.handed_over.fills(batch, batch.epoch);
    }
}
