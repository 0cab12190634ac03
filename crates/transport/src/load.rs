//! What lanes carry.

use page::{Batch, BlockBatch, PAGE_BYTES};

use crate::namer::{Labels, Unkept};

/// A batch of any kind. They share queue, lanes and acknowledgements.
#[derive(Debug)]
pub enum Load {
    /// Pages of guest RAM.
    Pages(Batch),
    /// Blocks of a disk.
    Blocks(BlockBatch),
    /// Pages that are on their way by name: the destination says which of them it
    /// wants.
    Named(Named),
    /// The same of pages whose bodies are not kept meanwhile.
    Asked(Asked),
    /// Pages that the destination is told of before they are handed over.
    Told(Told),
    /// Pages that the destination wants, having seen their names.
    Wanted(Batch),
    /// Pages that it wants after all.
    Again(Unkept),
}

/// A batch that goes by name.
#[derive(Debug)]
pub struct Named {
    pub(crate) batch: Batch,
    /// What the destination calls it by.
    pub(crate) ticket: u32,
}

/// Pages of a batch that go by name, whose bodies can be had again.
#[derive(Debug)]
pub struct Asked {
    pub(crate) unkept: Unkept,
    /// What the destination calls them by.
    pub(crate) ticket: u32,
}

/// Pages named ahead: what they contain now, and the destination may get elsewhere.
#[derive(Debug)]
pub struct Told {
    pub(crate) unkept: Unkept,
    pub(crate) labels: Labels,
}

impl From<Batch> for Load {
    fn from(batch: Batch) -> Self {
        Self::Pages(batch)
    }
}

impl From<BlockBatch> for Load {
    fn from(batch: BlockBatch) -> Self {
        Self::Blocks(batch)
    }
}

/// How much a load is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    Pages { body_bytes: u64, fill_bytes: u64 },
    Blocks { data_bytes: u64, zero_bytes: u64 },
}

impl Load {
    pub(crate) fn amount(&self) -> Amount {
        match self {
            Self::Pages(batch) | Self::Wanted(batch) | Self::Named(Named { batch, .. }) => {
                let body_bytes = (batch.bodies().len() * PAGE_BYTES) as u64;
                Amount::Pages { body_bytes, fill_bytes: batch.guest_bytes() - body_bytes }
            }
            Self::Again(unkept)
            | Self::Asked(Asked { unkept, .. })
            | Self::Told(Told { unkept, .. }) => {
                Amount::Pages { body_bytes: unkept.bytes(), fill_bytes: 0 }
            }
            Self::Blocks(batch) => {
                let data_bytes = batch.data().len() as u64;
                Amount::Blocks { data_bytes, zero_bytes: batch.bytes() - data_bytes }
            }
        }
    }

    /// The destination has it: its buffer goes back to the pool.
    pub(crate) fn acknowledged(self) {
        match self {
            Self::Pages(_)
            | Self::Wanted(_)
            | Self::Named(_)
            | Self::Asked(_)
            | Self::Told(_)
            | Self::Again(_) => {}
            Self::Blocks(batch) => batch.acknowledged(),
        }
    }
}
