//! QEMU's migration stream: read, split, write, without I/O.
//!
//! ```text
//! QEVM 3 | configuration | commands | START ram: block list, EOS | footer
//!        `----------------------- head --------------------------------'
//! PART ram: PAGE, ZERO, ..., EOS | footer        pages, any number of sections
//! END ram:  PAGE, ZERO, ..., EOS | footer        the last pages
//! FULL ... FULL | EOF | description              devices
//! ```
//!
//! The [`Splitter`] takes the pages out. The remainder is the non-RAM stream:
//! the head, and the tail, which is the END section without its pages and
//! everything after it. The destination puts pages that it can't write into
//! QEMU's memory back in between, with [`PartSection`]. Pages of a multifd
//! migration arrive as [`multifd`] packets on channels of their own.
#![forbid(unsafe_code)]

mod blocks;
mod cursor;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod global_state;
pub mod multifd;
mod postcopy;
mod record;
pub mod return_path;
mod splitter;
pub mod write;

pub use blocks::{BLOCK_BYTES_MAX, BLOCKS_MAX, Block, Blocks};
pub use error::{StreamError, Unsplittable};
pub use global_state::GlobalState;
pub use postcopy::{PostcopyWatch, resumes_postcopy};
pub use record::{MAGIC, RECORD_BYTES_MAX, VERSION};
pub use splitter::{HEAD_BYTES_MAX, Head, Progress, Sink, Splitter, Step, StreamKind};
pub use write::{NameTooLong, PartSection};
