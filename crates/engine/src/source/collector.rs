//! The tap's output: pages go to the lanes, the non-RAM stream to the control
//! connection.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_channel::Sender;
use data_threads::DataThreads;
use dedup::source::after;
use page::{Batch, Epoch};
use parking_lot::Mutex;
use qemu::ram_blocks::RamBlocks;
use ram::Numbered;
use stream::GlobalState;
use tap::{Head, Output, Stopped};

use super::context::Notice;
use super::pages::Pages;

pub(crate) struct Collector {
    pub(crate) pages: Pages,
    /// The VM's memory, as far as this agent can read it.
    pub(crate) ram: RamBlocks,
    pub(crate) numbered: Arc<Numbered>,
    pub(crate) notices: Sender<Notice>,
    pub(crate) global_state: Arc<Mutex<GlobalState>>,
}

impl Collector {
    fn notice(&self, notice: Notice) {
        // The receiver is gone only once the migration has ended.
        let _ = self.notices.send(notice);
    }

    fn non_ram(&self, whole: bool, bytes: &[u8]) -> Result<(), Stopped> {
        let before = self.pages.state.residue_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if before == 0 && !whole {
            self.notice(Notice::TailBegins);
        }
        self.pages.link.non_ram(whole, bytes).map_err(|_| Stopped)
    }
}

impl Output for Collector {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        let mapping = |block: &tap::Block| self.ram.mapping(&block.name, block.bytes);
        self.numbered.announce(head.blocks.iter().map(mapping));
        self.pages.announce(head)?;
        self.notice(Notice::FirstPassBegins);
        Ok(())
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        self.pages.arrived(batch, first);
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        self.pages.took(&mut batch);
        if let Some(naming) = &self.pages.naming {
            naming.hand_over(&mut batch);
            if batch.is_empty() {
                return Ok(());
            }
        }
        self.pages.lanes.submit(batch).map_err(|_| Stopped)
    }

    fn all_before(&self, epoch: Epoch) {
        if let Some(naming) = &self.pages.naming {
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
        self.pages.state.whole.write(bytes, |piece| self.non_ram(true, piece))
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.pages.threads))
    }
}
