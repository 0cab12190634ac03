//! Pages that the guest has changed since QEMU handed them over.
//!
//! A page that waited for its lane and differs now from what QEMU has in RAM was
//! written after QEMU copied it. QEMU cleared the page's dirty bit before it
//! copied, so the write has set it again, and the page comes once more before
//! the VM stops for good: its old content need not be sent. Where the link is
//! the bottleneck and the guest writes, that is a good part of all bytes.

use std::sync::{Arc, OnceLock};

use page::{Batch, PAGE_BYTES};
use qemu::ram_blocks::RamBlocks;
use ram::Mapping;

/// Compares batches with the source QEMU's RAM.
#[derive(Debug, Default)]
pub(crate) struct Sieve {
    ram: RamBlocks,
    /// By block number, once the block list is known.
    blocks: OnceLock<Vec<Option<Arc<Mapping>>>>,
}

impl Sieve {
    pub(crate) fn new(ram: RamBlocks) -> Self {
        Self { ram, blocks: OnceLock::new() }
    }

    /// The block list, as QEMU announced it.
    pub(crate) fn announce(&self, announced: &[tap::Block]) {
        let reached = |block: &tap::Block| {
            let ram = self.ram.reached.iter().find(|ram| ram.name == block.name)?;
            (ram.bytes == block.bytes).then(|| Arc::clone(&ram.mapping))
        };
        let _ = self.blocks.set(announced.iter().map(reached).collect());
    }
}

impl transport::Sieve for Sieve {
    fn sift(&self, batch: &mut Batch, scratch: &mut Vec<u8>) -> usize {
        let blocks = self.blocks.get().map_or(&[][..], Vec::as_slice);
        let Some(Some(ram)) = blocks.get(usize::from(batch.block.0)) else { return 0 };
        let bytes = batch.bodies().len() * PAGE_BYTES;
        scratch.resize(scratch.len().max(bytes), 0);
        let now = &mut scratch[..bytes];
        let offsets = batch.bodies().iter().map(|body| body.page.offset());
        // A QEMU that is gone shows elsewhere.
        if ram.gather(offsets, now).is_err() {
            return 0;
        }
        batch.retain_bodies(|nth, sent| now[nth * PAGE_BYTES..][..PAGE_BYTES] == *sent)
    }
}
