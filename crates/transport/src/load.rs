//! The loads that lanes carry.

use std::convert::Infallible;

use page::{BLOCK_BYTES_MAX, Batch, BlockBatch, PAGE_BYTES};

/// A load of a lane, which returns to the queue if the lane dies. All kinds share
/// queue, lanes and acknowledgements.
#[derive(Debug)]
pub enum Load<X = Infallible> {
    /// Pages of guest RAM.
    Pages(Batch),
    /// Blocks of a disk.
    Blocks(BlockBatch),
    /// A load of the stage between the queue and the lanes, in a format that only the
    /// stage knows.
    Other(X),
}

impl<X> From<Batch> for Load<X> {
    fn from(batch: Batch) -> Self {
        Self::Pages(batch)
    }
}

impl<X> From<BlockBatch> for Load<X> {
    fn from(batch: BlockBatch) -> Self {
        Self::Blocks(batch)
    }
}

/// The size of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    Pages { body_bytes: u64, fill_bytes: u64 },
    Blocks { data_bytes: u64, zero_bytes: u64 },
}

impl<X> Load<X> {
    pub(crate) fn amount(&self) -> Amount {
        match self {
            Self::Pages(batch) => {
                let body_bytes = (batch.bodies().len() * PAGE_BYTES) as u64;
                Amount::Pages { body_bytes, fill_bytes: batch.guest_bytes() - body_bytes }
            }
            Self::Blocks(batch) => {
                let data_bytes = batch.data().len() as u64;
                Amount::Blocks { data_bytes, zero_bytes: batch.bytes() - data_bytes }
            }
            // The stage counts it itself.
            Self::Other(_) => Amount::Pages { body_bytes: 0, fill_bytes: 0 },
        }
    }

    /// Bytes of buffers that it counts for in a lane's window: those of a full batch, however few
    /// of them it uses, because it keeps its buffer anyway. With fewer, a lane that is dead
    /// could take all buffers of the pool, each with a few bytes for the network.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        match self {
            Self::Pages(_) | Self::Blocks(_) => BLOCK_BYTES_MAX as u64,
            // There is no window while it waits for an answer, and the stage bounds it.
            Self::Other(_) => 0,
        }
    }

    /// Whether a stage sends it.
    pub(crate) fn is_other(&self) -> bool {
        matches!(self, Self::Other(_))
    }

    /// The destination has accepted it: its buffer returns to the pool.
    pub(crate) fn acknowledged(self) {
        match self {
            Self::Pages(_) | Self::Other(_) => {}
            Self::Blocks(batch) => batch.acknowledged(),
        }
    }
}
