//! What the tap reads, whichever program commands QEMU: pages go to the lanes, the non-RAM stream
//! to the control connection.
//!
//! [`own`](super::own) and `carried::observed` are the tap's outputs. Each adds what follows from
//! who commands QEMU: above all when the tail may flow.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use audit::HandedOver;
use crossbeam_channel::Sender;
use data_threads::DataThreads;
use dedup::source::{Naming, after};
use page::{Batch, PAGE_BYTES};
use tap::{Head, Stopped};
use wire::{Announced, ToDestination};

use super::control::stream_state::StreamState;
use super::lanes::Lanes;
use super::notice::Notice;
use crate::link::Link;

/// What QEMU hands over passes this, or is recorded in it.
pub(crate) struct Collector {
    pub(crate) state: Arc<StreamState>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) link: Arc<Link<ToDestination>>,
    pub(crate) handed_over: Arc<HandedOver>,
    /// None: pages don't go by name.
    pub(crate) naming: Option<Arc<Naming>>,
    pub(crate) threads: Arc<DataThreads>,
    pub(crate) notices: Sender<Notice>,
}

impl Collector {
    /// QEMU has announced its RAM: all that numbers blocks learns of them, and the destination.
    pub(crate) fn head(&self, head: Head) -> Result<(), Stopped> {
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
        self.link.send(&said).and_then(|()| self.link.head(bytes)).map_err(|_| Stopped)?;
        self.notice(Notice::FirstPassBegins);
        Ok(())
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

    /// Has the lanes send a batch.
    pub(crate) fn submit(&self, batch: Batch) -> Result<(), Stopped> {
        self.lanes.submit(batch).map_err(|_| Stopped)
    }

    /// QEMU has handed over a piece of the tail.
    pub(crate) fn took_tail(&self, bytes: &[u8]) {
        if self.count(bytes) == 0 {
            self.notice(Notice::TailBegins);
        }
    }

    /// Sends a piece of a stream that can't be split, at its pace.
    pub(crate) fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        if let Some(reason) = reason {
            self.notice(Notice::Unsplittable(reason.to_owned()));
        }
        self.state.whole.write(bytes, |piece| {
            // A piece at a time: this shows whether the migration makes progress.
            self.count(piece);
            self.link.non_ram(true, piece).map_err(|_| Stopped)
        })
    }

    /// Counts bytes of the non-RAM stream. Returns how many came before.
    pub(crate) fn count(&self, bytes: &[u8]) -> u64 {
        self.state.residue_bytes.fetch_add(bytes.len() as u64, Relaxed)
    }

    pub(crate) fn notice(&self, notice: Notice) {
        // The receiver is dropped only once the migration has ended.
        let _ = self.notices.send(notice);
    }
}
