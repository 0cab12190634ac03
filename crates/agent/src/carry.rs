//! Migrations that others command, such as libvirt: listeners at which this agent stands for
//! other hosts, and the connections to them.
//!
//! A listener is either one port of a loopback address that stands for another host, for each
//! port that migrations use there, or a socket with the same path on both hosts. A
//! connection is carried to the QEMU, or disk server, that waits at the same port or path
//! on the other host. With KubeVirt and Proxmox VE, listeners replace the sockets that these
//! create when a VM is to leave.

mod bypass;
mod listener;
mod listener_set;
mod listeners;
mod takeovers;

pub(crate) use listeners::CarryListeners;
pub use listeners::CarryListenersError;
