//! Disk blocks at the destination: from a lane into the sink's buffers.

use std::io::Read;
use std::sync::Arc;

use page::{BlockBatch, Decoder, Encoding};
use wire::{BlockHeader, WireError};

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

/// Where a lane's disk blocks go, asked for at the first batch of them. The
/// buffers are used again for each batch.
pub(crate) struct Blocks<F> {
    announced: F,
    sink: Option<Arc<dyn BlockSink>>,
    payload: Vec<u8>,
    table: [u8; BlockHeader::TABLE_BYTES_MAX],
}

impl<F: Fn() -> Result<Arc<dyn BlockSink>, LaneEnd>> Blocks<F> {
    pub(crate) fn new(announced: F) -> Self {
        let table = [0; BlockHeader::TABLE_BYTES_MAX];
        Self { announced, sink: None, payload: Vec::new(), table }
    }

    pub(crate) fn receive(
        &mut self,
        lane: &mut impl Read,
        header: BlockHeader,
        decoder: &mut Decoder,
    ) -> Result<(), LaneEnd> {
        let sink = match &mut self.sink {
            Some(sink) => sink,
            none => none.insert((self.announced)()?),
        };
        // The header has capped the number of extents.
        let table = &mut self.table[..header.table_bytes()];
        lane.read_exact(table)?;
        let mut batch = sink.room()?;
        header.fill(table, &mut batch)?;
        let encoding = Encoding::try_from(header.encoding)
            .map_err(|error| LaneEnd::Decode(error.to_string()))?;
        let payload_bytes = header.payload_bytes as usize;
        if encoding == Encoding::Raw {
            if payload_bytes != batch.data().len() {
                return Err(WireError::Contradiction("raw disk blocks of another length").into());
            }
            lane.read_exact(batch.data_mut())?;
        } else {
            self.payload.resize(payload_bytes, 0);
            lane.read_exact(&mut self.payload)?;
            decoder
                .decode_blocks(encoding, &self.payload, batch.data_mut())
                .map_err(|error| LaneEnd::Decode(error.to_string()))?;
        }
        Ok(sink.take(batch)?)
    }
}
