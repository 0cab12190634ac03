//! Benchmarks: contenders move the same guest over the same links, in turn.

mod beside;
pub mod contest;
mod cpu;
pub mod neighbour;
pub mod plain_tcp;
pub mod result;
pub mod scenario;
pub mod table;
mod warm;
