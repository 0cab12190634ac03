//! Disk writes, from the NBD server that the source's QEMU mirrors to, to the
//! NBD server of the destination's QEMU.
//!
//! ```text
//! QEMU -> serve -> DiskSource ==lanes==> DiskSink -> NbdWriter -> QEMU
//! ```
//!
//! Lanes reorder batches, and when a lane fails its batches are sent again, perhaps after the
//! first copy has arrived. The destination's disk must still end up as if the writes had been
//! applied in the order of issue. Three rules ensure that:
//!
//! - The [`DiskSource`] gives each batch the next number of its disk, before it reports the write
//!   to QEMU as complete. So a write that QEMU issues after another has completed has the higher
//!   number.
//! - The [`DiskSink`] accepts each number once. Where ranges overlap, the higher number wins, like
//!   the newest epoch of a page: of a batch that arrives late, only the parts that no later batch
//!   has covered are written. So the sink never waits for a batch in flight; the source does only
//!   when `SEQUENCES_AHEAD_MAX` numbers are outstanding. Accepting a batch and deciding what is
//!   left to write are one step under one lock.
//! - What is left is written in the order of acceptance. A range is locked while it is written:
//!   overlapping writes wait for each other, all others are in flight together.
//!
//! A lane acknowledges a batch that the sink has accepted. Only flushed data is durable:
//! [`DiskSource::flush`] waits until all batches issued before are acknowledged, then has the sink
//! write them and flush.

#![forbid(unsafe_code)]

mod sequences;
mod serve;
mod sink;
mod source;
mod zeros;

pub use serve::{ServeError, serve};
pub use sink::{
    DiskSink, Done, NbdWriter, SinkCounts, SinkDisk, SinkError, WriteBlocks, WriteFailure,
};
pub use source::{Carry, DiskSource, SourceCounts, SourceError};
