//! Reads QEMU's migration stream from its sockets: pages go on as batches, the
//! non-RAM stream (the residue) unchanged.
//!
//! QEMU connects to one unix socket, once for the main channel and once for
//! each multifd channel, in no particular order. Each connection gets a thread.
//! Pages are parsed in place, in the pool's buffers that they were read into;
//! an empty pool makes the threads wait, and so QEMU.
//!
//! The stream is over when every connection has reached its end, each between
//! two packets or sections: at the end of a migration QEMU closes them all.

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

pub use counters::Counters;
pub use error::TapError;
pub use handle::{Stopper, Summary, Taken, Tap};
pub use output::{Block, Head, Output, Stopped, Unsplittable};
pub use shared::Channels;
pub use socket::abort;
