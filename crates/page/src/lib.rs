//! Types for guest RAM pages and disk blocks in flight: addresses and counts,
//! the batches that carry them, the bounded pool that provides the batches, and
//! the encodings they have on a lane.
//!
//! Everything between the tap and the placer moves as a [`Batch`]: at most
//! [`BATCH_PAGES`] page bodies and any number of fill runs, of one RAM block
//! and one epoch. A batch owns one buffer of the [`Pool`]; dropping the batch
//! returns the buffer, which is the backpressure of the whole system.
//!
//! Disks use the same pool: a [`BlockBatch`] is one stretch of one disk in a
//! buffer of the same kind.

mod address;
mod batch;
mod block_batch;
mod budget;
mod buffer;
mod delta;
mod doubt;
mod encoding;
mod fill;
mod heap;
mod page_set;
mod pool;
mod reserve;
mod slot;

pub use address::{BlockId, Epoch, PAGE_BYTES, PageIndex};
pub use batch::{Batch, PagesMut};
pub use block_batch::{
    BLOCK_BYTES_MAX, BlockBatch, BlockIssuer, DiskId, EXTENT_BYTES_MAX, EXTENTS_MAX, Piece,
};
pub use budget::{Budget, BudgetFull, PoolClosed};
pub use buffer::Buffer;
pub use delta::{Delta, DeltaWriter, Deltas, PART_BYTES, PARTS};
pub use encoding::{
    DecodeError, Decoder, Encoded, Encoder, Encoding, SHRINK_WORTH, encoded_bytes_max,
};
pub use fill::is_zero;
pub use heap::give_back_freed_memory;
pub use page_set::PageSet;
pub use pool::{Pool, Room};
pub use reserve::{Borrowed, Reserve};
pub use slot::{BATCH_PAGES, Body, Extent, Fill, SLOT_BYTES};
