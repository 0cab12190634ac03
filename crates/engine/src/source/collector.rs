//! The tap's output: pages go to the lanes, the non-RAM stream to the control
//! connection.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use audit::HandedOver;
use crossbeam_channel::Sender;
use data_threads::DataThreads;
use dedup::source::{Naming, after};
use page::{Batch, Epoch, PAGE_BYTES};
use parking_lot::Mutex;
use qemu::ram_blocks::RamBlocks;
use ram::Numbered;
use stream::GlobalState;
use tap::{Head, Output, Stopped};
use wire::{Announced, ToDestination};

use super::context::Notice;
use super::control::stream_state::StreamState;
use super::control::throttle::OurStops;
use super::lanes::Lanes;
use crate::link::Link;

pub(crate) struct Collector {
    pub(crate) state: Arc<StreamState>,
    /// The VM's memory, as far as this agent can read it.
    pub(crate) ram: RamBlocks,
    pub(crate) numbered: Arc<Numbered>,
    pub(crate) handed_over: Arc<HandedOver>,
    pub(crate) naming: Option<Arc<Naming>>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) link: Arc<Link<ToDestination>>,
    pub(crate) notices: Sender<Notice>,
    pub(crate) stops: Arc<OurStops>,
    pub(crate) global_state: Arc<Mutex<GlobalState>>,
    pub(crate) threads: Arc<DataThreads>,
}

impl Collector {
    fn notice(&self, notice: Notice) {
        // The receiver is gone only once the migration has ended.
        let _ = self.notices.send(notice);
    }

    fn non_ram(&self, whole: bool, bytes: &[u8]) -> Result<(), Stopped> {
        let before = self.state.residue_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if before == 0 && !whole {
            self.notice(Notice::TailBegins);
        }
        self.link.non_ram(whole, bytes).map_err(|_| Stopped)
    }
}

impl Output for Collector {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        let ram_bytes = head.blocks.iter().map(|block| block.bytes).sum();
        self.state.announce_ram(ram_bytes, head.epoch_by_section);
        let mapping = |block: &tap::Block| self.ram.mapping(&block.name, block.bytes);
        self.numbered.announce(head.blocks.iter().map(mapping));
        let pages = head.blocks.iter().map(|block| block.bytes / PAGE_BYTES as u64);
        self.handed_over.announce(pages);
        let announced =
            |block: &tap::Block| Announced { name: block.name.clone(), bytes: block.bytes };
        let blocks: Vec<Announced> = head.blocks.iter().map(announced).collect();
        if let Some(naming) = &self.naming {
            naming.announce(&blocks, head.epoch_by_section);
        }
        if let Some(deltas) = self.lanes.deltas() {
            deltas.announce(&blocks);
        }
        let said =
            ToDestination::Blocks { blocks, ram_section: head.ram_section, footers: head.footers };
        self.link.say(&said).and_then(|()| self.link.head(head.bytes)).map_err(|_| Stopped)?;
        self.notice(Notice::FirstPassBegins);
        Ok(())
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        let bodies = &batch.bodies()[first..];
        self.handed_over.bodies(batch, bodies, after(batch.epoch));
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        batch.epoch = after(batch.epoch);
        self.state.took(&batch);
        self.handed_over.fills(&batch, batch.epoch);
        if let Some(naming) = &self.naming {
            naming.hand_over(&mut batch);
            if batch.is_empty() {
                return Ok(());
            }
        }
        self.lanes.submit(batch).map_err(|_| Stopped)
    }

    fn all_before(&self, epoch: Epoch) {
        if let Some(naming) = &self.naming {
            naming.all_before(after(epoch));
        }
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.non_ram(false, bytes)?;
        self.global_state.lock().push(bytes);
        Ok(())
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        if let Some(reason) = reason {
            self.notice(Notice::Unsplittable(reason.to_owned()));
        }
        self.state.whole.write(bytes, |piece| self.non_ram(true, piece))
    }

    fn ram_ended(&self) -> bool {
        self.stops.end()
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.threads))
    }
}
