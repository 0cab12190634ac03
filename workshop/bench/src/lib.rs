//! Benchmarks: contenders move the same guest over the same links, in turn.

mod beside;
pub mod cache;
pub mod contender;
pub mod contest;
mod count;
mod cpu;
pub mod demo;
pub mod gang;
pub mod goals;
pub mod image;
mod machine;
pub mod neighbour;
pub mod paired;
pub mod path;
pub mod plain_tcp;
pub mod rest;
pub mod result;
mod rounds;
pub mod scenario;
pub mod served;
mod slowed;
mod stolen;
pub mod sweep;
pub mod table;
pub mod visitors;
mod warm;
pub mod writers;
