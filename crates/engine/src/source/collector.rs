//! Where the tap hands things to: pages to the lanes, residue to the control
//! connection.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_channel::Sender;
use data_threads::DataThreads;
use page::{Batch, Epoch};
use tap::{Head, Output, Stopped};
use transport::Lanes;
use wire::{Announced, ToDestination};

use super::Notice;
use super::announcer;
use super::audit::HandedOver;
use super::naming::Naming;
use super::stale_filter::StaleFilter;
use super::stream_state::StreamState;
use super::throttle::OurStops;
use crate::link::Link;

pub(super) struct Collector {
    pub(crate) state: Arc<StreamState>,
    pub(crate) stale_filter: Arc<StaleFilter>,
    pub(super) handed_over: Arc<HandedOver>,
    pub(super) naming: Option<Arc<Naming>>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) link: Arc<Link<ToDestination>>,
    pub(crate) notices: Sender<Notice>,
    pub(super) stops: Arc<OurStops>,
    pub(crate) threads: Arc<DataThreads>,
}

impl Collector {
    fn notice(&self, notice: Notice) {
        // Nobody listens any more only once the migration has ended.
        let _ = self.notices.send(notice);
    }

    fn residue(&self, whole: bool, bytes: &[u8]) -> Result<(), Stopped> {
        let before = self.state.residue_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if before == 0 && !whole {
            self.notice(Notice::TailBegins);
        }
        self.link.residue(whole, bytes).map_err(|_| Stopped)
    }
}

impl Output for Collector {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        self.state.announce_ram(head.blocks.iter().map(|block| block.bytes).sum());
        self.stale_filter.announce(&head.blocks);
        self.handed_over.announce(&head.blocks);
        if let Some(naming) = &self.naming {
            naming.announce(&head.blocks);
        }
        let blocks = head
            .blocks
            .iter()
            .map(|block| Announced { name: block.name.clone(), bytes: block.bytes })
            .collect();
        let said =
            ToDestination::Blocks { blocks, ram_section: head.ram_section, footers: head.footers };
        self.link.say(&said).and_then(|()| self.link.head(head.bytes)).map_err(|_| Stopped)?;
        self.notice(Notice::FirstPassBegins);
        Ok(())
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        let bodies = &batch.bodies()[first..];
        self.handed_over.bodies(batch, bodies, announcer::after(batch.epoch));
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        batch.epoch = announcer::after(batch.epoch);
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
            naming.all_before(announcer::after(epoch));
        }
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.residue(false, bytes)
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        if let Some(reason) = reason {
            self.notice(Notice::Unsplittable(reason.to_owned()));
        }
        self.residue(true, bytes)
    }

    fn ram_ended(&self) -> bool {
        self.stops.end()
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.threads))
    }
}
