//! What can go wrong with guest RAM, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why guest RAM could not be made, mapped or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A size that no RAM can have. The operator's or our own mistake.
    #[error(
        "RAM of {bytes} bytes can't be made of pages of {page_bytes} bytes: the size must be a multiple of it and not zero"
    )]
    BadSize {
        /// The size that was asked for.
        bytes: u64,
        /// The size of the pages.
        page_bytes: u64,
    },
    /// The host has no pages of that size.
    #[error(
        "this host has no huge pages of {page_bytes} bytes: the sizes it has are listed in /sys/kernel/mm/hugepages"
    )]
    NoSuchPages {
        /// The size that was asked for.
        page_bytes: u64,
    },
    /// The host's pool of huge pages has no room.
    #[error(
        "this host's pool has no room for {} huge pages of {page_bytes} bytes: raise \
         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages, or run the VM without huge pages",
        bytes / page_bytes,
        page_bytes / 1024
    )]
    PoolTooSmall {
        /// Bytes that were asked for.
        bytes: u64,
        /// The size of the huge pages.
        page_bytes: u64,
    },
    /// The kernel refused to make the file of memory. The local host's fault.
    #[error("making {bytes} bytes of RAM called {name} on this host")]
    Create {
        /// The RAM's name.
        name: String,
        /// Its size.
        bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file of another process's RAM can't be opened.
    #[error("opening the RAM at {}: the agent must run as the user of that QEMU, or as root", path.display())]
    Open {
        /// Where it was looked for.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is not shared memory, so what is written there is not RAM.
    #[error("{} is not shared memory (memfd, tmpfs or hugetlbfs)", path.display())]
    NotMemory {
        /// The file.
        path: PathBuf,
    },
    /// The kernel refused to map the file. The local host's fault.
    #[error(
        "mapping {bytes} bytes of RAM into the agent: is there enough memory and address space?"
    )]
    Map {
        /// Bytes to be mapped.
        bytes: u64,
        /// What the kernel said.
        source: io::Error,
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
    /// A piece to throw away that is longer than the scratch buffer.
    #[error("a piece of {bytes} bytes does not fit the scratch buffer of {scratch_bytes}")]
    ScratchTooSmall {
        /// The piece's length.
        bytes: usize,
        /// The buffer's.
        scratch_bytes: usize,
    },
    /// A hole can only be made of whole pages.
    #[error("{bytes} bytes at offset {offset} are not whole pages of {page_bytes} bytes")]
    NotWholePages {
        /// Where the hole would begin.
        offset: u64,
        /// How long it would be.
        bytes: u64,
        /// The size of the pages.
        page_bytes: u64,
    },
    /// The kernel refused an operation on the RAM. The local host's fault.
    #[error("{action} RAM on this host")]
    Local {
        /// What was attempted.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The host ran out of memory to put behind the RAM.
    #[error("this host has no memory left to put behind the VM's RAM")]
    NoMemory,
    /// The connection that bytes were read from. Its peer or the network is to
    /// blame.
    #[error("reading page bytes from the peer")]
    Receive {
        /// What the kernel said.
        source: io::Error,
    },
}
