//! The helper in a guest. Asked over a virtio-serial port, it tells which pages of
//! the guest's memory are clean page cache, and where on a virtio disk each has its
//! content, so that they need not be moved over the network.
//!
//! It needs no kernel module: `/proc/self/pagemap` and `/proc/kpageflags` know
//! what a page is, `FIEMAP` where a file has its blocks. What it tells is a hint.
//! A page may change as soon as it was looked at, so what it can't vouch for it
//! leaves out, and whoever uses a page compares it first.
//!
//! It is a guest in its guest: it runs when nobody else wants the CPU or the disk,
//! it maps files and never reads them, it opens only what the kernel has in mind
//! already, and marks nothing as used.

mod arena;
mod batch;
mod budget;
mod clearing;
mod deleted;
mod disks;
mod extents;
mod file;
mod flags;
mod found;
pub mod idle;
mod mounts;
mod pagemap;
pub mod port;
pub mod serve;
pub mod survey;
mod told;
mod touch;
mod walk;
