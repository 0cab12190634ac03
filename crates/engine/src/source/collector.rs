//! Where the tap hands things to: pages to the lanes, residue to the control
//! connection.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crew::Crew;
use crossbeam_channel::Sender;
use page::{Batch, Epoch};
use tap::{Head, Output, Stopped};
use transport::Lanes;
use wire::{Announced, ToDestination};

use super::Notice;
use super::ahead;
use super::audit::HandedOver;
use super::live::Live;
use super::naming::Naming;
use super::sieve::Sieve;
use super::throttle::OurStops;
use crate::link::Link;

pub(super) struct Collector {
    pub(crate) live: Arc<Live>,
    pub(crate) sieve: Arc<Sieve>,
    pub(super) handed_over: Arc<HandedOver>,
    pub(super) naming: Option<Arc<Naming>>,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) link: Arc<Link<ToDestination>>,
    pub(crate) notices: Sender<Notice>,
    pub(super) stops: Arc<OurStops>,
    pub(crate) crew: Arc<Crew>,
}

impl Collector {
    fn notice(&self, notice: Notice) {
        // Nobody listens any more only once the migration has ended.
        let _ = self.notices.send(notice);
    }

    fn residue(&self, whole: bool, bytes: &[u8]) -> Result<(), Stopped> {
        let before = self.live.residue_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if before == 0 && !whole {
            self.notice(Notice::TailBegins);
        }
        self.link.residue(whole, bytes).map_err(|_| Stopped)
    }
}

impl Output for Collector {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        self.live.announce_ram(head.blocks.iter().map(|block| block.bytes).sum());
        self.sieve.announce(&head.blocks);
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

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        crew::point();
        batch.epoch = ahead::after(batch.epoch);
        self.live.took(&batch);
        self.handed_over.take(&batch);
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
            naming.all_before(ahead::after(epoch));
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

    fn crew(&self) -> Option<Arc<Crew>> {
        Some(Arc::clone(&self.crew))
    }
}
