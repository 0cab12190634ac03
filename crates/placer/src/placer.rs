//! The placer: checks arriving pages, and passes them to their block's placement.

use std::collections::HashSet;
use std::sync::Arc;

use audit::{Delivery, Hash, Ledger};
use page::{BlockId, Buffer, Deltas, Epoch, Fill, PAGE_BYTES, PageIndex};

use crate::block::{Block, BlockPlan, Placement};
use crate::inline::Inline;
use crate::mapped::Mapped;
use crate::place::{Gate, PageTarget};
use crate::{FeederHandle, PlaceError};

/// Inline RAM may be overcommitted several times over, but not without a limit: the placer's own
/// tables take a thousandth of the announced size.
const OVERCOMMIT_MAX: u64 = 4;

/// A VM with hundreds of devices and DIMMs has some hundreds of blocks. Each name may be
/// announced only once: otherwise a mapped block's tables would be made each time.
const BLOCKS_MAX: usize = 4096;

/// Writes the pages that lanes deliver into the RAM of the arriving VM. Shared
/// by all lanes.
#[derive(Debug)]
pub struct Placer {
    blocks: Vec<Block>,
    feeder: FeederHandle,
    gate: Gate,
    ledger: Option<Arc<Ledger>>,
}

impl Placer {
    /// A placer for `blocks`, in the order of the source's block list.
    ///
    /// Finds out what mapped RAM already holds: QEMU must have built its machine before, and must
    /// not write RAM itself afterwards.
    ///
    /// # Errors
    /// If a block differs from the one here, or can't exist.
    pub fn new(blocks: Vec<BlockPlan>, feeder: FeederHandle) -> Result<Self, PlaceError> {
        if blocks.len() > BLOCKS_MAX {
            return Err(PlaceError::TooManyBlocks { blocks: blocks.len(), max: BLOCKS_MAX });
        }
        let mut names = HashSet::new();
        if let Some(twice) = blocks.iter().find(|plan| !names.insert(plan.name.as_str())) {
            return Err(PlaceError::BlockTwice { name: twice.name.clone() });
        }
        let host_bytes = host_bytes();
        let max_bytes = host_bytes.saturating_mul(OVERCOMMIT_MAX);
        let announced_bytes = blocks
            .iter()
            .filter(|plan| matches!(plan.placement, Placement::Inline))
            .fold(0_u64, |sum, plan| sum.saturating_add(plan.bytes));
        if announced_bytes > max_bytes {
            return Err(PlaceError::TooMuchRam { bytes: announced_bytes, max_bytes });
        }
        let blocks = blocks.into_iter().map(Block::new).collect::<Result<_, _>>()?;
        Ok(Self { blocks, feeder, gate: Gate::default(), ledger: None })
    }

    /// The same placer, which also notes what is placed by this hash, for the audit to compare
    /// with what QEMU handed over.
    ///
    /// # Errors
    /// If there is no memory for the notes.
    pub fn audited(self, hash: Hash) -> Result<Self, PlaceError> {
        let ledger = Ledger::new(hash, self.blocks.iter().map(|block| block.pages));
        let ledger = ledger.ok_or(PlaceError::NoMemory)?;
        Ok(Self { ledger: Some(Arc::new(ledger)), ..self })
    }

    /// What was placed, if it is audited.
    #[must_use]
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.as_ref()
    }

    /// Places runs of one byte.
    ///
    /// # Errors
    /// If the source's data is invalid, and then nothing is placed; or if RAM can't be written,
    /// or QEMU stopped reading.
    pub fn place_fills(
        &self,
        block: BlockId,
        epoch: Epoch,
        fills: &[Fill],
    ) -> Result<(), PlaceError> {
        let place = self.place(block, epoch, Delivery::Fill)?;
        match &place.block.placement {
            Placement::Mapped(mapping) => Mapped { place, mapping }.place_fills(fills),
            Placement::Inline => Inline { place, feeder: &self.feeder }.place_fills(fills),
        }
    }

    /// Checks whether these pages could be placed.
    ///
    /// # Errors
    /// If the block is unknown, or pages are outside of it, too many, or repeated.
    pub fn check(&self, block: BlockId, pages: &[PageIndex]) -> Result<(), PlaceError> {
        self.block(block)?.span_of_pages(pages).map(drop)
    }

    /// Places bodies, one after the other in `bytes`, that arrived by `delivery`.
    ///
    /// # Errors
    /// As [`Placer::place_fills`].
    pub fn place_bodies(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        delivery: Delivery,
    ) -> Result<(), PlaceError> {
        let place = self.place(block, epoch, delivery)?;
        if bytes.len() != pages.len() * PAGE_BYTES {
            return Err(PlaceError::WrongLength { bytes: bytes.len(), pages: pages.len() });
        }
        match &place.block.placement {
            Placement::Mapped(mapping) => Mapped { place, mapping }.place_bodies(pages, bytes),
            Placement::Inline => Inline { place, feeder: &self.feeder }.place_bodies(pages, bytes),
        }
    }

    /// Places pages that arrived as deltas. `bodies` is a buffer that is reused.
    ///
    /// # Errors
    /// As [`Placer::place_fills`]; and if a page's base is not the version here.
    pub fn place_deltas(
        &self,
        block: BlockId,
        epoch: Epoch,
        pages: &[PageIndex],
        deltas: Deltas<'_>,
        bodies: &mut Buffer,
    ) -> Result<(), PlaceError> {
        let place = self.place(block, epoch, Delivery::Body)?;
        let Placement::Mapped(mapping) = &place.block.placement else {
            return Err(PlaceError::NoBase { name: place.block.name.clone() });
        };
        Mapped { place, mapping }.place_deltas(pages, deltas, bodies)
    }

    /// Places nothing more. When this returns, no thread writes RAM. To be called when RAM is
    /// complete and before the VM runs, because a lane that was given up long ago may still
    /// deliver a batch that has arrived over another one.
    pub fn close(&self) {
        self.gate.close();
        // A thread that passed the gate before holds a range. One that locks a range after this
        // sees the gate closed, because the lock orders the two.
        for block in &self.blocks {
            drop(block.lock.lock(0..block.pages));
        }
    }

    fn place(
        &self,
        number: BlockId,
        epoch: Epoch,
        delivery: Delivery,
    ) -> Result<PageTarget<'_>, PlaceError> {
        let block = self.block(number)?;
        let ledger = self.ledger.as_ref().and_then(|ledger| ledger.block(number));
        Ok(PageTarget { block, gate: &self.gate, epoch, delivery, ledger })
    }

    fn block(&self, block: BlockId) -> Result<&Block, PlaceError> {
        self.blocks
            .get(usize::from(block.0))
            .ok_or(PlaceError::UnknownBlock { block, blocks: self.blocks.len() })
    }
}

/// The RAM that this host has.
#[must_use]
pub fn host_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    #[allow(clippy::useless_conversion, reason = "other widths on other machines")]
    let (total, unit) = (u64::from(info.totalram), u64::from(info.mem_unit.max(1)));
    total.saturating_mul(unit)
}
