//! Benchmarks: contenders move the same guest over the same links, in turn.

mod beside;
pub mod cache;
pub mod contest;
mod cpu;
pub mod gang;
pub mod goals;
pub mod neighbour;
pub mod paired;
pub mod plain_tcp;
pub mod result;
pub mod scenario;
pub mod served;
mod slowed;
pub mod sweep;
pub mod table;
pub mod visitors;
mod warm;
pub mod writers;
