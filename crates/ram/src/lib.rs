//! Reads and writes guest RAM inside QEMU's process.
//!
//! A [`Mapping`] is a range of addresses of another process: a RAM block of a
//! QEMU. The kernel copies to and from it (`process_vm_writev`), so QEMU keeps
//! its RAM as it was allocated, whatever its command line says: anonymous memory
//! with transparent huge pages, hugetlbfs, NUMA backends, a file.
//!
//! # Why not memory shared with QEMU
//! At first the agent made a memfd, QEMU used it as its RAM, and pages were
//! received straight into it. But *reading* a hole of a memfd allocates it, and
//! QEMU's own migration reads all of RAM to find zero pages. So a source filled
//! up to its full size, which took longer than sending it. In anonymous memory a
//! hole reads as the kernel's one zero page and stays a hole. Also, a memfd has
//! no transparent huge pages unless the administrator changes a setting that is
//! off everywhere. One more copy per page at the destination is cheap against
//! that.
//!
//! # Concurrent writes
//! All access is a copy by the kernel to or from the agent's memory: no
//! reference to guest memory ever exists. A byte that the guest writes during a
//! copy may be old or new.
//!
//! Offsets come from peers. Each is checked against the RAM's size; an offset
//! outside is an error, never an access.

mod backing;
mod error;
mod file;
mod holes;
mod mapping;
mod numbered;
mod pagemap;
mod pieces;

pub use error::RamError;
pub use file::RamFile;
pub use mapping::Mapping;
pub use numbered::Numbered;
pub use pagemap::DataRanges;
pub use pieces::Piece;
