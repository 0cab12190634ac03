//! Errors of access to guest RAM, and what to do about them.

use std::io;

/// Why guest RAM was not reachable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// The kernel denies access to QEMU's memory.
    #[error(
        "the agent may not reach the memory of QEMU's process {pid}: to place pages straight into \
         it, run the agent as the user of that QEMU, or as root with CAP_SYS_PTRACE"
    )]
    Denied {
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has ended.
    #[error("QEMU's process {pid} has exited, and its memory with it")]
    Exited {
        /// QEMU's process.
        pid: u32,
    },
    /// The range that QEMU reported as RAM is not memory of its process.
    #[error("there is no writable memory of {bytes} bytes at {base:#x} in process {pid}")]
    NotThere {
        /// QEMU's process.
        pid: u32,
        /// The first byte's address.
        base: u64,
        /// The expected length in bytes.
        bytes: u64,
    },
    /// An access outside the RAM. The source of the offset is to blame.
    #[error("{bytes} bytes at offset {offset} are not inside RAM of {size_bytes} bytes")]
    OutOfRange {
        /// The offset of the access.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The size of the RAM.
        size_bytes: u64,
    },
    /// The host has no memory left for the RAM.
    #[error(
        "this host has no memory left for the VM's RAM: free some, or raise the pool of huge \
         pages or the limit of QEMU's cgroup"
    )]
    NoMemory,
    /// Another refusal by the kernel. The local host is to blame.
    #[error("{action} the RAM of process {pid}: {source}")]
    Local {
        /// The action that failed.
        action: &'static str,
        /// QEMU's process.
        pid: u32,
        /// The kernel's error.
        source: io::Error,
    },
}
