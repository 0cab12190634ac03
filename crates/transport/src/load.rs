//! What lanes carry.

use std::convert::Infallible;

use page::{Batch, BlockBatch, PAGE_BYTES};

/// What goes by a lane, and comes back to the queue if that dies. All kinds share
/// queue, lanes and acknowledgements.
#[derive(Debug)]
pub enum Load<X = Infallible> {
    /// Pages of guest RAM.
    Pages(Batch),
    /// Blocks of a disk.
    Blocks(BlockBatch),
    /// What a stage sends, that stands between the queue and the lanes: it knows what
    /// that is.
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

/// How much a load is.
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
            // Its stage counts what it is.
            Self::Other(_) => Amount::Pages { body_bytes: 0, fill_bytes: 0 },
        }
    }

    /// What it keeps of a pool, in bytes.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        match self.amount() {
            Amount::Pages { body_bytes, .. } => body_bytes,
            Amount::Blocks { data_bytes, .. } => data_bytes,
        }
    }

    /// Whether a stage sends it on its own account.
    pub(crate) fn is_other(&self) -> bool {
        matches!(self, Self::Other(_))
    }

    /// The destination has it: its buffer goes back to the pool.
    pub(crate) fn acknowledged(self) {
        match self {
            Self::Pages(_) | Self::Other(_) => {}
            Self::Blocks(batch) => batch.acknowledged(),
        }
    }
}
