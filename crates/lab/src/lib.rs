//! Hosts as network namespaces, tiny Linux guests, and QEMU's own migration to compare with.

pub mod agent;
pub mod bench;
pub mod certificates;
pub mod contender;
mod count;
pub mod cpio;
pub mod demo;
pub mod error;
pub mod guest;
pub mod hosts;
pub mod image;
pub mod program;
pub mod setup;
pub mod simulate;
pub mod unprivileged;
