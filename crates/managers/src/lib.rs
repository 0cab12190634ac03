//! The programs that command migrations which agents carry: what is special to each of them.

#![forbid(unsafe_code)]

pub mod kubevirt;
pub mod proxmox;
pub mod takeover;
