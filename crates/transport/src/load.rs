//! What lanes carry.

use page::{Batch, BlockBatch, PAGE_BYTES};

use crate::namer::{Labels, RereadPages};

/// A batch of any kind. They share queue, lanes and acknowledgements.
#[derive(Debug)]
pub enum Load {
    /// Pages of guest RAM.
    Pages(Batch),
    /// Blocks of a disk.
    Blocks(BlockBatch),
    /// Asks by name which pages the destination lacks; their bodies are kept until it
    /// has answered.
    Query(Query),
    /// The same for pages whose bodies are read again if it lacks them.
    LightQuery(LightQuery),
    /// Pages that are announced before QEMU hands them over.
    Announce(Announcement),
    /// Pages that the destination requested after a query.
    Requested(Batch),
    /// Pages that are read again because the destination requested them.
    Reread(RereadPages),
}

/// A batch that is offered by name.
#[derive(Debug)]
pub struct Query {
    pub(crate) batch: Batch,
    /// What the destination calls it by.
    pub(crate) ticket: u32,
}

/// Pages that are offered by name and can be read again.
#[derive(Debug)]
pub struct LightQuery {
    pub(crate) reread: RereadPages,
    /// What the destination calls them by.
    pub(crate) ticket: u32,
}

/// Pages and the names of what they contain now.
#[derive(Debug)]
pub struct Announcement {
    pub(crate) reread: RereadPages,
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
            Self::Pages(batch) | Self::Requested(batch) | Self::Query(Query { batch, .. }) => {
                let body_bytes = (batch.bodies().len() * PAGE_BYTES) as u64;
                Amount::Pages { body_bytes, fill_bytes: batch.guest_bytes() - body_bytes }
            }
            Self::Reread(reread)
            | Self::LightQuery(LightQuery { reread, .. })
            | Self::Announce(Announcement { reread, .. }) => {
                Amount::Pages { body_bytes: reread.bytes(), fill_bytes: 0 }
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
            | Self::Requested(_)
            | Self::Query(_)
            | Self::LightQuery(_)
            | Self::Announce(_)
            | Self::Reread(_) => {}
            Self::Blocks(batch) => batch.acknowledged(),
        }
    }
}
