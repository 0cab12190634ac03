//! What a host has and restricts: network cards, taps, CPU time and memory by cgroups, the rights
//! of its users, directories for sockets, and programs that are run for what they print.

pub mod child;
pub mod nic;
pub mod quota;
pub mod rights;
pub mod socket_dir;
pub mod taps;
