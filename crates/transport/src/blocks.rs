//! Where disk blocks go at the destination.

use page::BlockBatch;

use crate::receiver::LaneEnd;

/// What takes over the disk blocks that lanes bring. Shared by all lanes.
pub trait BlockSink: Send + Sync {
    /// An empty batch to receive into, from the sink's own bounded pool. Blocks
    /// while that is used up: then the lane is not read, and the source waits.
    ///
    /// # Errors
    /// If the sink has failed or the migration ended.
    fn room(&self) -> Result<BlockBatch, TakeError>;

    /// Takes a batch over; when this returns, it is acknowledged. Batches come
    /// in any order, and more than once.
    ///
    /// # Errors
    /// If the batch can't be one of this migration's, the sink has failed, or
    /// the migration ended.
    fn take(&self, batch: BlockBatch) -> Result<(), TakeError>;
}

/// Why a sink takes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The migration ended.
    #[error("the migration ended")]
    Over,
    /// The source sent what no disk of this migration can take.
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
