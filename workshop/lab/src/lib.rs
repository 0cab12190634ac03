//! Hosts as network namespaces, tiny guests, agents on hosts, emulated hosts with Xen, and all that
//! these need.

pub mod agent;
pub mod certificates;
pub mod cpio;
pub mod error;
pub mod fatal;
pub mod field;
pub mod guest;
pub mod held;
pub mod hosts;
pub mod libvirt;
pub mod program;
pub mod setup;
pub mod systemd;
pub mod unprivileged;
pub mod xen;
