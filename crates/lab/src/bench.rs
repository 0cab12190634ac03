//! Benchmarks: contenders move the same guest over the same links, in turn.

mod beside;
pub mod contest;
mod cpu;
pub mod goals;
pub mod neighbour;
pub mod plain_tcp;
pub mod result;
pub mod scenario;
mod slowed;
pub mod sweep;
pub mod table;
mod warm;
pub mod writers;
