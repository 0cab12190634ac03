//! Migrations that others command, such as libvirt: doors at which this agent stands for
//! other hosts, and the connections to them.
//!
//! A door is either one port of a loopback address that stands for another host, for each
//! port that migrations use there, or a socket with the same path on both hosts. A
//! connection is carried to the QEMU, or disk server, that waits at the same port or path
//! on the other host. With KubeVirt and Proxmox VE, doors replace the sockets that these
//! create when a VM is to leave.

mod bypass;
mod door;
mod doors;
mod posts;
mod takeovers;

pub use doors::DoorsError;
pub(crate) use doors::{Doors, Reopener};
