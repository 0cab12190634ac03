//! Guest RAM inside QEMU's process, written and read from here.
//!
//! A [`Mapping`] is a range of addresses of another process: a RAM block of a
//! QEMU. The kernel copies to and from it (`process_vm_writev`), so QEMU keeps
//! its RAM as it made it, whatever its command line says: anonymous memory with
//! transparent huge pages, hugetlbfs, NUMA backends, a file.
//!
//! # Why not memory shared with QEMU
//! It was so at first: the agent made a memfd, QEMU used it as its RAM, and
//! pages were received straight into it. But *reading* a hole of a memfd
//! allocates it, and QEMU's own migration reads all of RAM to find zero pages.
//! So a source filled up to its full size, and that took longer than sending it.
//! In anonymous memory a hole reads as the kernel's one zero page and stays a
//! hole. And a memfd has no transparent huge pages unless the administrator
//! changed a setting that is off everywhere.
//! One more copy per page at the destination is cheap against that.
//!
//! # Memory that others write
//! All access is a copy made by the kernel to or from memory of our own: no
//! reference to a guest's memory ever exists here. A byte that the guest writes
//! during a copy may come out old or new.
//!
//! Offsets come from peers. Every one is checked against the RAM's size, and
//! one outside is an error, never an access.

mod backing;
mod error;
mod holes;
mod mapping;
mod numbered;
mod pagemap;
mod pieces;

pub use error::RamError;
pub use mapping::Mapping;
pub use numbered::Numbered;
pub use pagemap::DataRanges;
pub use pieces::Piece;
