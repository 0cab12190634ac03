//! Pages of a VM's image, read at a migration's destination from the storage
//! that both hosts share.
//!
//! ```text
//! add(items) -> stretches of the image, swept upwards -> requests of up to 1 MiB
//!                     |                                     |  N threads, blocking reads
//!                     v                                     v
//!      take_from_the_end: over the network        Consumer::read(pages of a request)
//! ```
//!
//! A [`Reader`] reads wanted pages in the image's order, many requests at a
//! time, while the caller takes those with the highest offsets, to request them over
//! the network; both stop where they meet. [`FileSource`] reads a raw image,
//! [`NbdSource`] an NBD export, and [`Exporter`] makes one of an image in any format
//! that QEMU knows, or of one on an NFS server. [`open`] chooses.
//!
//! **What is read may be anything.** The guest may have written the block since its
//! content was announced, or write it during the read; the storage may be the wrong
//! one; a format's tables may have changed since they were read. So the consumer
//! hashes pages and compares the names; a page that differs is requested over the
//! network. For the same reason nothing here is durable, locked or retried.
//!
//! **Bad storage costs nothing but the saving.** Requests are as large as the
//! storage answers in a tenth of a second. A failed request fails its own
//! items; many failures, or one request without an answer, end the reader, which
//! gives back everything that is not read. A thread that hangs in the kernel is
//! left behind and counted; with too many of them, no new reader is started.
//!
//! **Threads, not io_uring.** A request costs 11 µs of CPU with either, and both
//! read as fast as the storage does (docs/benchmarks/parts.md). With threads, the
//! one that reads pages also hashes them, so hashing uses several CPUs. A ring whose
//! storage has died can't be closed, and needs `unsafe` for each request.

#![forbid(unsafe_code)]

mod buffer;
mod consumer;
mod exporter;
mod failure;
mod file;
mod image;
mod pace;
mod probe;
mod reader;
mod remote;
mod requested;
mod size;
mod source;

pub use buffer::{ALIGNMENT_MAX, Buffer};
pub use consumer::{Consumer, Pages};
pub use exporter::Exporter;
pub use failure::{Failure, OpenError};
pub use file::FileSource;
pub use image::{Image, Layer, NfsFile, Opened, Opening, Opens, begin_to_open, open};
pub use nbd::reader::Endpoint;
pub use pace::Pace;
pub use probe::Probe;
pub use reader::{Progress, Reader, Settings, abandoned_threads};
pub use remote::NbdSource;
pub use requested::Item;
pub use source::Source;
