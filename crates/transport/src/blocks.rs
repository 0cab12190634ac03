//! The receiver of disk blocks at the destination.

use page::BlockBatch;

use crate::receiver::LaneEnd;

/// Takes the disk blocks that lanes receive. Shared by all lanes.
pub trait BlockSink: Send + Sync {
    /// An empty batch to receive into, from the sink's own bounded pool. Blocks
    /// while that is used up: the lane is then not read, and the source waits.
    ///
    /// # Errors
    /// If the sink has failed or the migration has ended.
    fn room(&self) -> Result<BlockBatch, TakeError>;

    /// Takes a batch over; it is acknowledged when this returns. Batches arrive
    /// in any order, and may arrive more than once.
    ///
    /// # Errors
    /// If the batch can't belong to this migration, the sink has failed, or the
    /// migration has ended.
    fn take(&self, batch: BlockBatch) -> Result<(), TakeError>;
}

/// Why a sink refuses a batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The migration ended.
    #[error("the migration ended")]
    Over,
    /// The source sent blocks that no disk of this migration can take.
    #[error("the source sent disk blocks that cannot be written: {0}")]
    Peer(String),
    /// A disk can't be written.
    #[error("{0}")]
    Disk(String),
}

impl From<TakeError> for LaneEnd {
    fn from(error: TakeError) -> Self {
        match error {
            TakeError::Over => Self::Over,
            error => Self::Blocks(error),
        }
    }
}
