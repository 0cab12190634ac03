//! What places the pages of an arriving VM, as far as pages by name need it: a VM of QEMU has a
//! [`Placer`], and what else can arrive has a writer of its own.

use audit::Delivery;
use page::{BlockId, Epoch, Fill, PageIndex};
use placer::Placer;
use transport::LaneEnd;

/// Places the pages of an arriving VM.
pub trait PagePlacer: Send + Sync {
    /// Places runs of one byte, for a lane of the VM.
    ///
    /// # Errors
    /// If they can't be placed.
    fn place_fills(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) -> Result<(), LaneEnd>;

    /// Checks whether these pages may go by name, for a lane of the VM, and waits until they can be
    /// placed.
    ///
    /// # Errors
    /// If they may not, or can't be placed.
    fn check(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]) -> Result<(), LaneEnd>;

    /// Places bodies, one after the other in `bytes`, for a lane of the VM.
    ///
    /// # Errors
    /// If they can't be placed.
    fn place_bodies(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> Result<(), LaneEnd>;

    /// The same for a thread that serves other VMs too, and pages that were checked. False if they
    /// can't be placed now: the VM's source sends them.
    fn place_late(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> bool {
        self.place_bodies(block, epoch, pages, bytes, delivery).is_ok()
    }

    /// Whether [`PagePlacer::place_late`] waits for nothing, also where the VM's memory can't be
    /// written from here.
    fn never_waits(&self) -> bool {
        false
    }
}

impl PagePlacer for Placer {
    fn place_fills(&self, block: BlockId, epoch: Epoch, fills: &[Fill]) -> Result<(), LaneEnd> {
        Ok(Placer::place_fills(self, block, epoch, fills)?)
    }

    fn check(&self, block: BlockId, _: Epoch, pages: &[PageIndex]) -> Result<(), LaneEnd> {
        Ok(Placer::check(self, block, pages)?)
    }

    fn place_bodies(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> Result<(), LaneEnd> {
        Ok(Placer::place_bodies(self, block, epoch, pages, bytes, delivery)?)
    }
}
