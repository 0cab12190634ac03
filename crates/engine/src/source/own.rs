//! The tap's output for a QEMU that this agent commands. The tail is sent at once: the destination
//! keeps it.

use std::sync::Arc;

use data_threads::DataThreads;
use dedup::source::after;
use page::{Batch, Epoch};
use parking_lot::Mutex;
use qemu::ram_blocks::RamBlocks;
use ram::Numbered;
use stream::GlobalState;
use tap::{Head, Output, Stopped};

use super::collector::Collector;

pub(crate) struct Own {
    pub(crate) collector: Collector,
    /// The VM's memory, as far as this agent can read it.
    pub(crate) ram: RamBlocks,
    pub(crate) numbered: Arc<Numbered>,
    pub(crate) global_state: Arc<Mutex<GlobalState>>,
}

impl Output for Own {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        let mapping = |block: &tap::Block| self.ram.mapping(&block.name, block.bytes);
        self.numbered.announce(head.blocks.iter().map(mapping));
        self.collector.head(head)
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        self.collector.arrived(batch, first);
    }

    fn batch(&self, mut batch: Batch) -> Result<(), Stopped> {
        data_threads::point();
        self.collector.took(&mut batch);
        if let Some(naming) = &self.collector.naming {
            naming.hand_over(&mut batch);
            if batch.is_empty() {
                return Ok(());
            }
        }
        self.collector.submit(batch)
    }

    fn all_before(&self, epoch: Epoch) {
        if let Some(naming) = &self.collector.naming {
            naming.all_before(after(epoch));
        }
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.collector.took_tail(bytes);
        self.collector.link.non_ram(false, bytes).map_err(|_| Stopped)?;
        self.global_state.lock().push(bytes);
        Ok(())
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        self.collector.whole(bytes, reason)
    }

    fn threads(&self) -> Option<Arc<DataThreads>> {
        Some(Arc::clone(&self.collector.threads))
    }
}
