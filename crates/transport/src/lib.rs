//! Lanes: connections between two agents that carry batches.
//!
//! At the source, [`Lanes`] owns one sender and one acknowledgement thread per
//! lane. All lanes pull from one queue, so a slow one takes less and a dead
//! one nothing; what a dead one had not delivered goes back to the queue's
//! head. A batch keeps its pool buffer until the destination says that it is
//! *placed*, so the pool bounds everything between QEMU and the far RAM.
//!
//! At the destination, an [`Incoming`] is one lane. Whoever drives it has pages
//! placed, once all of a batch is in a buffer of the lane's own, and disk blocks
//! taken by a [`BlockSink`], raw ones from the socket straight into its buffers.
//! What is encrypted is opened on the way there (crate `identity`). A batch that
//! takes a while is answered later ([`Question`]), and the lane goes on.

#![forbid(unsafe_code)]

mod announce;
mod blocks;
mod connect;
mod error;
mod flight;
mod lanes;
mod load;
mod meter;
mod namer;
mod outage;
mod overflow;
mod pacer;
mod pending;
mod queue;
mod receiver;
mod reluctance;
mod replies;
mod sender;
mod spare;
mod stale_filter;

pub use announce::Reserved;
pub use blocks::{BlockSink, TakeError};
pub use connect::{Endpoint, connect, tune};
pub use error::{LaneError, LanesError};
pub use lanes::{Lanes, LanesPlan};
pub use load::Load;
pub use meter::{Delivered, LaneMeter, LaneTimes, thread_cpu};
pub use namer::{Asking, Labels, Namer};
pub use overflow::Overflow;
pub use receiver::{Incoming, LaneEnd};
pub use replies::Question;
pub use stale_filter::StaleFilter;
