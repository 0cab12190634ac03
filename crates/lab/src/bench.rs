//! Benchmarks: contenders move the same guest over the same links, in turn.

pub mod result;
pub mod table;
