//! The helper in a guest. On request over a virtio-serial port, it reports which pages of the
//! guest's memory are clean page cache, and where on a virtio disk each has its content, so that
//! they need not be sent over the network.
//!
//! It needs no kernel module: `/proc/self/pagemap` and `/proc/kpageflags` tell what a page is, and
//! `FIEMAP` where a file has its blocks. A report is a hint. A page may change as soon as it was
//! examined, so the helper omits what it can't vouch for, and the agent compares a page before it
//! uses it.
//!
//! It disturbs the guest as little as possible: it keeps to its budget and gives way to others, it
//! maps files and never reads them, it opens only what the kernel has cached already, and marks
//! nothing as accessed.

mod arena;
mod batch;
mod btrfs;
mod budget;
mod clearing;
mod deleted;
mod disks;
mod extents;
mod file;
mod flags;
mod found;
mod mapper;
mod mounts;
mod pagemap;
pub mod port;
pub mod priority;
mod reported;
pub mod serve;
pub mod survey;
mod touch;
mod walk;
