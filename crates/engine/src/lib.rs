//! One migration: the source's side, the destination's side, their phases and
//! the report.

#![forbid(unsafe_code)]

mod host;
mod watch;

pub use host::{Arriving, Host, Local, Peer, Refusal, SourceVm};
pub use watch::Watch;
