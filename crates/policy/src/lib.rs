//! Decisions as pure functions: a sample of the current state goes in, what to
//! do comes out. No sockets, no clocks, no threads: tested with tables and
//! simulated time.

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
