//! Pages of guest RAM on their way: addresses and counts as types, the
//! batches they travel in, and the bounded pool those batches come from.
//!
//! Everything between the tap and the placer moves as a [`Batch`]: at most
//! [`BATCH_PAGES`] page bodies and any number of fill runs, of one RAM block
//! and one epoch. A batch owns one buffer of the [`Pool`]; dropping the batch
//! gives the buffer back, and that is the backpressure of the whole system.

mod address;
mod batch;
mod pool;

pub use address::{BlockId, Epoch, PAGE_BYTES, PageIndex};
pub use batch::{BATCH_PAGES, Batch, Body, Fill, SLOT_BYTES};
pub use pool::{Pool, PoolClosed};
