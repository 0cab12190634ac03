//! What a host has and restricts: network cards, CPU time and memory by cgroups, and the rights of
//! its users.

pub mod nic;
pub mod quota;
pub mod rights;
