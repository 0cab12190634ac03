//! Lanes: connections between two agents that carry batches.
//!
//! At the source, [`Lanes`] owns one sender and one acknowledgement thread per
//! lane. All lanes pull from one queue, so a slow one takes less and a dead
//! one nothing; what a dead one had not delivered goes back to the queue's
//! head. A batch keeps its pool buffer until the destination says that it is
//! *placed*, so the pool bounds everything between QEMU and the far RAM. A stage
//! may stand between the queue and the lanes: then the lanes' threads hand it what
//! they take, it has them carry loads that only it knows, and it settles with the
//! [`Queue`] what becomes of them.
//!
//! At the destination, an [`Incoming`] is one lane. Whoever drives it has pages
//! placed, once all of a batch is in a buffer of the lane's own, and disk blocks
//! taken by a [`BlockSink`], raw ones from the socket straight into its buffers.
//! What is encrypted is opened on the way there (crate `identity`). A batch that
//! takes a while is answered later ([`Question`]), and the lane goes on.

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
mod queueing;
mod receiver;
mod reluctance;
mod replies;
mod sender;
mod stale_filter;
mod window;

pub use acks::{Acks, Released};
pub use blocks::{BlockSink, TakeError};
pub use connect::{Endpoint, connect, tune};
pub use deltas::Deltas;
pub use error::{LaneError, LanesError};
pub use lane::{Lane, run_plain};
pub use lanes::{Lanes, LanesPlan};
pub use load::Load;
pub use meter::{Delivered, LaneMeter, LaneTimes, thread_cpu};
pub use overflow::Overflow;
pub use queue::{Change, Queue, Sent, Work};
pub use receiver::{Incoming, LaneEnd};
pub use replies::Question;
pub use sender::Sender;
pub use stale_filter::StaleFilter;
