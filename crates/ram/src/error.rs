//! What can go wrong with guest RAM, and what to do about it.

use std::io;

/// Why guest RAM could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// The kernel doesn't let us at QEMU's memory.
    #[error(
        "the agent may not reach the memory of QEMU's process {pid}: to place pages straight into \
         it, run the agent as the user of that QEMU, or as root with CAP_SYS_PTRACE"
    )]
    Denied {
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has ended.
    #[error("QEMU's process {pid} is gone, and its memory with it")]
    Gone {
        /// QEMU's process.
        pid: u32,
    },
    /// What QEMU called its RAM is not memory of its process.
    #[error("there is no writable memory of {bytes} bytes at {base:#x} in process {pid}")]
    NotThere {
        /// QEMU's process.
        pid: u32,
        /// The first byte's address.
        base: u64,
        /// How many bytes should be there.
        bytes: u64,
    },
    /// An access outside the RAM. Whoever gave the offset is to blame.
    #[error("{bytes} bytes at offset {offset} are not inside RAM of {size_bytes} bytes")]
    OutOfRange {
        /// Where the access begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// The size of the RAM.
        size_bytes: u64,
    },
    /// The host has no memory left to put behind the RAM.
    #[error(
        "this host has no memory left for the VM's RAM: free some, or raise the pool of huge \
         pages or the limit of QEMU's cgroup"
    )]
    NoMemory,
    /// Something else that the kernel refused. The local host's fault.
    #[error("{action} the RAM of process {pid}: {source}")]
    Local {
        /// What was tried.
        action: &'static str,
        /// QEMU's process.
        pid: u32,
        /// What the kernel said.
        source: io::Error,
    },
}
