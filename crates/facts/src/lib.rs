//! What VMs, their disks and their hosts are, as one agent tells another: types,
//! and what follows from them alone. Whoever asks QEMU or the kernel for them, and
//! whoever sends them, has them from here.

#![forbid(unsafe_code)]

pub mod disks;
pub mod host;
pub mod memory;
pub mod program;
pub mod shape;
