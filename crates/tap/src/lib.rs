//! Reads QEMU's migration stream from its sockets: pages become batches, and
//! the non-RAM stream is passed on unchanged.
//!
//! QEMU connects to one unix socket, once for the main channel and once for
//! each multifd channel, in no particular order. Each connection gets a thread.
//! Pages are parsed in place, in the pool's buffers that they were read into;
//! an empty pool blocks the threads, and so QEMU.
//!
//! The stream has ended when every connection has ended between two packets or
//! sections: QEMU closes them all at the end of a migration.

#![forbid(unsafe_code)]

mod accept;
mod answer;
mod channel;
mod counters;
mod epochs;
mod error;
mod filling;
mod handle;
mod main_channel;
mod output;
mod shared;
mod socket;

pub use error::TapError;
pub use handle::{Stopper, Taken, TakenChannel, Tap};
pub use output::{Block, Head, Output, Stopped, Unsplittable};
pub use shared::Channels;
pub use socket::{abort, is_passing};
