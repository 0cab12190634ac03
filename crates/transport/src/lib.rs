//! Lanes: connections between two agents that carry batches.
//!
//! At the source, [`Lanes`] owns one sender and one acknowledgement thread per
//! lane. All lanes pull from one queue, so a slow lane takes less and a dead one
//! nothing; undelivered batches of a dead lane go back to the queue's head. A
//! batch keeps its pool buffer until the destination reports it *placed*, so the
//! pool bounds everything between QEMU and the destination's RAM. A stage may
//! stand between the queue and the lanes: the lanes' threads then hand it the
//! batches that they take, it sends loads of its own kind, and it reports their
//! outcome to the [`Queue`].
//!
//! At the destination, an [`Incoming`] is one lane. The thread that drives it
//! places pages once they are in a buffer of the agent's, and passes disk blocks to
//! a [`BlockSink`], raw ones from the socket straight into the sink's buffers.
//! Encrypted data is decrypted on the way (crate `identity`). A batch that takes
//! long is answered later ([`Question`]), and the lane continues meanwhile.

#![forbid(unsafe_code)]

mod acks;
mod blocks;
mod connect;
mod deltas;
mod error;
mod flight;
mod lane;
mod lanes;
mod load;
mod meter;
mod outage;
mod overflow;
mod pacer;
mod queue;
mod receiver;
mod reluctance;
mod replies;
mod sender;
mod shared;
mod stale_filter;
mod unpackers;
mod window;

pub use acks::{Acks, Released};
pub use blocks::{BlockSink, TakeError};
pub use connect::{DEAD_AFTER, Endpoint, connect, tune};
pub use deltas::Deltas;
pub use error::{LaneError, LanesError};
pub use lane::{Lane, run_plain};
pub use lanes::Lanes;
pub use load::Load;
pub use meter::{Delivered, LaneMeter, LaneTimes, thread_cpu};
pub use overflow::Overflow;
pub use pacer::Pacer;
pub use queue::{Change, Queue, Sent, Work};
pub use receiver::{Incoming, LaneEnd};
pub use replies::Question;
pub use sender::Sender;
pub use shared::LanesPlan;
pub use stale_filter::StaleFilter;
pub use unpackers::Unpackers;
