//! Disk writes, from the NBD server that the source's QEMU mirrors to, to the
//! NBD server of the destination's QEMU.
//!
//! ```text
//! QEMU -> serve -> DiskSource ==lanes==> DiskSink -> NbdWriter -> QEMU
//! ```
//!
//! Lanes reorder, and when one dies what it carried comes again, perhaps after
//! its first copy. Still the destination's disk must be what the writes make
//! of it in the order in which they were issued. Three things see to that:
//!
//! - The [`DiskSource`] gives each batch the next number of its disk. It does
//!   so before QEMU hears that the write is done, so of two writes of which one
//!   waited for the other, the later has the higher number.
//! - The [`DiskSink`] takes each number once. Where ranges overlap, the higher
//!   number wins, like the newest epoch of a page: of a batch that comes after
//!   one that was issued later, only the rest is written. So nobody ever waits
//!   for a batch that is still on its way, at neither end. Taking, and deciding
//!   what is left to write, is one step under one lock.
//! - What is left is written in the order it was taken. A range is locked while
//!   its write is under way: writes that overlap wait for each other, all
//!   others are in flight together.
//!
//! A lane acknowledges what the sink has taken over. Durable is only what was
//! flushed: [`DiskSource::flush`] waits until all that was issued before is
//! acknowledged, then has the sink write it out and flush.

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
