//! Benchmarks: contenders move the same guest over the same links, in turn.

pub mod contest;
mod cpu;
pub mod plain_tcp;
pub mod result;
pub mod scenario;
pub mod table;
mod warm;
