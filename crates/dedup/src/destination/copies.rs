//! Copies of pages that this host has, to be placed elsewhere in RAM.

use audit::Delivery;
use content::{Index, Key, Name};
use page::{BlockId, Buffer, Epoch, PAGE_BYTES, PageIndex, PageSet};
use transport::LaneEnd;

use super::page_placer::PagePlacer;

/// Copies of up to a batch of pages, in buffers that are reused.
#[derive(Default)]
pub(super) struct Copies {
    pub(super) bytes: Buffer,
    found: Vec<bool>,
    pages: Vec<PageIndex>,
}

impl Copies {
    /// Copies will lie in this buffer.
    pub(super) fn within(bytes: Buffer) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Copies the content of those names that are found here, and notes their `pages`. Returns
    /// which were found.
    pub(super) fn find(
        &mut self,
        index: &Index,
        key: &Key,
        names: &[Name],
        pages: impl Iterator<Item = PageIndex>,
    ) -> PageSet {
        let bytes = self.bytes.room(names.len() * PAGE_BYTES);
        index.find(names, key, bytes, &mut self.found);
        self.pages.clear();
        let mut here = PageSet::NONE;
        for (nth, page) in pages.enumerate().filter(|(nth, _)| self.found[*nth]) {
            here.insert(nth);
            let from = nth * PAGE_BYTES;
            bytes.copy_within(from..from + PAGE_BYTES, self.pages.len() * PAGE_BYTES);
            self.pages.push(page);
        }
        here
    }

    /// Places the copies, for a lane of the VM.
    pub(super) fn place(
        &self,
        placer: &dyn PagePlacer,
        block: BlockId,
        epoch: Epoch,
    ) -> Result<(), LaneEnd> {
        if self.pages.is_empty() {
            return Ok(());
        }
        placer.place_bodies(block, epoch, &self.pages, self.bodies(), Delivery::SameHost)
    }

    /// The same for a thread that serves other VMs too. False if they can't be placed.
    pub(super) fn place_late(&self, placer: &dyn PagePlacer, block: BlockId, epoch: Epoch) -> bool {
        self.pages.is_empty()
            || placer.place_late(block, epoch, &self.pages, self.bodies(), Delivery::SameHost)
    }

    fn bodies(&self) -> &[u8] {
        &self.bytes[..self.pages.len() * PAGE_BYTES]
    }
}
