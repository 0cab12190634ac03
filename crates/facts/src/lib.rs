//! Facts about VMs, their disks and their hosts, as one agent tells another: types, and what
//! follows from them alone. The code that reads them from QEMU or the kernel and the code that
//! sends them both depend on this crate.

#![forbid(unsafe_code)]

pub mod disks;
pub mod host;
pub mod memory;
pub mod program;
pub mod shape;
