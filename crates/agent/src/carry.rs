//! Migrations that somebody else commands, such as libvirt: doors at which this agent
//! stands for other hosts, and the connections that are made to them.
//!
//! A door is an address of loopback for each other host, with all ports that migrations
//! use there; or a socket that has the same path on both hosts. The caller is
//! carried to the QEMU, or disk server, that waits at the same port or path there. With
//! KubeVirt and Proxmox VE doors take the place of sockets that these make when a VM is to
//! leave.

mod around;
mod door;
mod doors;
mod posts;
mod takeovers;

pub use doors::DoorsError;
pub(crate) use doors::{Doors, Reopener};
