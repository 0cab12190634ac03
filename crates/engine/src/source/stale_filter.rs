//! Pages that the guest has changed since QEMU handed them over.
//!
//! A page that waited for its lane and differs now from what QEMU has in RAM was
//! written after QEMU copied it. QEMU cleared the page's dirty bit before it
//! copied, so the write has set it again, and the page comes once more before
//! the VM stops for good: its old content need not be sent. Where the link is
//! the bottleneck and the guest writes, that is a good part of all bytes.

use std::sync::{Arc, OnceLock};

use page::{BATCH_PAGES, Batch, BlockId, PAGE_BYTES, PageIndex};
use qemu::ram_blocks::RamBlocks;
use ram::Mapping;

use super::audit::HandedOver;

/// Compares batches with the source QEMU's RAM.
#[derive(Debug, Default)]
pub(crate) struct StaleFilter {
    ram: RamBlocks,
    handed_over: Arc<HandedOver>,
    /// By block number, once the block list is known.
    blocks: OnceLock<Vec<Option<Arc<Mapping>>>>,
}

impl StaleFilter {
    pub(super) fn new(ram: RamBlocks, handed_over: Arc<HandedOver>) -> Self {
        Self { ram, handed_over, blocks: OnceLock::new() }
    }

    /// The block list, as QEMU announced it.
    pub(crate) fn announce(&self, announced: &[tap::Block]) {
        let reached = |block: &tap::Block| {
            let ram = self.ram.reached.iter().find(|ram| ram.name == block.name)?;
            (ram.bytes == block.bytes).then(|| Arc::clone(&ram.mapping))
        };
        let _ = self.blocks.set(announced.iter().map(reached).collect());
    }

    fn block(&self, block: BlockId) -> Option<&Mapping> {
        self.blocks.get()?.get(usize::from(block.0))?.as_deref()
    }

    /// Whether this block can be read.
    pub(super) fn reaches(&self, block: BlockId) -> bool {
        self.block(block).is_some()
    }

    /// Reads what pages contain now. False if that can't be had.
    pub(super) fn read(&self, block: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        let offsets = pages.iter().map(|page| page.offset());
        self.block(block).is_some_and(|ram| ram.gather(offsets, into).is_ok())
    }
}

impl transport::StaleFilter for StaleFilter {
    fn drop_stale(&self, batch: &mut Batch, scratch: &mut Vec<u8>) -> usize {
        let Some(ram) = self.block(batch.block) else { return 0 };
        let bytes = batch.bodies().len() * PAGE_BYTES;
        scratch.resize(scratch.len().max(bytes), 0);
        let now = &mut scratch[..bytes];
        let offsets = batch.bodies().iter().map(|body| body.page.offset());
        // A QEMU that is gone shows elsewhere.
        if ram.gather(offsets, now).is_err() {
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
