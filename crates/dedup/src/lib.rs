//! Deduplication: the source sends a page by name, and the destination finds its content
//! elsewhere.
//!
//! [`source`] names the pages that QEMU hands over, and announces those that disks have before
//! that. [`destination`] is a stage behind the lanes: it takes batches of names and answers for
//! each page whether it is placed, is awaited from another provider, or is wanted from the
//! source. [`rack`] gets content from other hosts, [`storage`] from disks.

#![forbid(unsafe_code)]

pub mod destination;
pub mod rack;
pub mod source;
pub mod storage;
