//! QMP, launching QEMU, its command line, and what a VM consists of; and
//! QEMU's side of a migration at both ends.
//!
//! Nothing here reads QEMU's migration stream: `tap` does.

pub mod command_line;
pub mod commanded;
pub mod dirty_rate;
pub mod disks;
pub mod environment;
pub mod export;
pub mod fuzzing;
pub mod guest_disks;
pub mod guest_memory;
pub mod guest_port;
pub mod incoming;
pub mod launch;
pub mod lost_writes;
pub mod machine;
pub mod mirror;
pub mod outgoing;
pub mod probe;
pub mod process;
pub mod programs;
pub mod qmp;
pub mod ram_blocks;
pub mod rendezvous;
pub mod room;
pub mod secrets;
pub mod shape;
pub mod socket;
pub mod upgrade;
