//! Pages that the guest has changed since QEMU handed them over.
//!
//! A page that waited for its lane and differs now from what QEMU has in RAM was
//! written after QEMU copied it. QEMU cleared the page's dirty bit before it
//! copied, so the write has set it again, and the page comes once more before
//! the VM stops for good: its old content need not be sent. Where the link is
//! the bottleneck and the guest writes, that is a good part of all bytes.

use std::sync::Arc;

use page::{BATCH_PAGES, Batch, PAGE_BYTES, PageIndex};
use ram::Numbered;

use super::audit::HandedOver;

/// Compares batches with the source QEMU's RAM.
#[derive(Debug, Default)]
pub(crate) struct StaleFilter {
    ram: Arc<Numbered>,
    handed_over: Arc<HandedOver>,
}

impl StaleFilter {
    pub(super) fn new(ram: Arc<Numbered>, handed_over: Arc<HandedOver>) -> Self {
        Self { ram, handed_over }
    }
}

impl transport::StaleFilter for StaleFilter {
    fn drop_stale(&self, batch: &mut Batch, scratch: &mut Vec<u8>) -> usize {
        if !self.ram.reaches(batch.block) {
            return 0;
        }
        let bytes = batch.bodies().len() * PAGE_BYTES;
        scratch.resize(scratch.len().max(bytes), 0);
        let now = &mut scratch[..bytes];
        let pages = batch.bodies().iter().map(|body| body.page);
        // A QEMU that is gone shows elsewhere.
        if !self.ram.read(batch.block, pages, now) {
            return 0;
        }
        let mut pages = [PageIndex::default(); BATCH_PAGES];
        for (page, body) in pages.iter_mut().zip(batch.bodies()) {
            *page = body.page;
        }
        let (block, epoch) = (batch.block, batch.epoch);
        batch.retain_bodies(|nth, sent| {
            let is_newest = now[nth * PAGE_BYTES..][..PAGE_BYTES] == *sent;
            if !is_newest {
                self.handed_over.left_out(block, pages[nth], epoch);
            }
            is_newest
        })
    }
}
