//! Decisions as pure functions from a sample of the current state to an action. Without sockets,
//! clocks and threads, they are tested with tables and in simulated time.

#![forbid(unsafe_code)]

pub mod chase;
pub mod effort;
pub mod gang;
pub mod hold;
pub mod mirror;
pub mod pace;
pub mod passes;
pub mod precopy;
pub mod switchover;
pub mod throttle;
pub mod yielding;
