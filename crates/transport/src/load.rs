//! What lanes carry.

use page::{Batch, BlockBatch, PAGE_BYTES};

/// A batch of either kind. Pages and disk blocks share queue, lanes and
/// acknowledgements.
#[derive(Debug)]
pub enum Load {
    /// Pages of guest RAM.
    Pages(Batch),
    /// Blocks of a disk.
    Blocks(BlockBatch),
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
    /// Bytes that travel, before they are encoded.
    pub(crate) fn payload_bytes(&self) -> usize {
        match self {
            Self::Pages(batch) => batch.bodies().len() * PAGE_BYTES,
            Self::Blocks(batch) => batch.data().len(),
        }
    }

    pub(crate) fn amount(&self) -> Amount {
        let payload_bytes = self.payload_bytes() as u64;
        match self {
            Self::Pages(batch) => Amount::Pages {
                body_bytes: payload_bytes,
                fill_bytes: batch.guest_bytes() - payload_bytes,
            },
            Self::Blocks(batch) => Amount::Blocks {
                data_bytes: payload_bytes,
                zero_bytes: batch.bytes() - payload_bytes,
            },
        }
    }

    /// The destination has it: its buffer goes back to the pool.
    pub(crate) fn acknowledged(self) {
        match self {
            Self::Pages(batch) => drop(batch),
            Self::Blocks(batch) => batch.acknowledged(),
        }
    }
}
