//! Hosts as network namespaces, tiny Linux guests, agents on them, and what all of
//! that needs.

pub mod agent;
pub mod certificates;
pub mod cpio;
pub mod error;
pub mod guest;
pub mod hosts;
pub mod libvirt;
pub mod program;
pub mod setup;
pub mod unprivileged;
