//! What a host has and restricts: network cards, taps, CPU time and memory by cgroups, the rights
//! of its users, and directories for sockets.

pub mod nic;
pub mod quota;
pub mod rights;
pub mod socket_dir;
pub mod taps;
