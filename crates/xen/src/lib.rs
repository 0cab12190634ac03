//! The stream that `xl migrate` writes to its transport: read, split and joined, without I/O.
//!
//! ```text
//! xl header, domain's configuration
//! libxl header | LIBXC_CONTEXT
//!   libxc headers | PV_INFO, CPUID_POLICY, ... STATIC_DATA_END, P2M_FRAMES
//!                 | PAGE_DATA, PAGE_DATA, ...            pages, in passes that nothing marks
//!                 | VERIFY, PAGE_DATA, ...               all of them again, with `--debug` only
//!                 | TSC_INFO, VCPU_BASIC or HVM_CONTEXT, ... END
//! EMULATOR_CONTEXT, ... END
//! ```
//!
//! The [`Splitter`] takes the pages out of PAGE_DATA. What is left is the non-RAM stream. The
//! [`Joiner`] at the destination makes new PAGE_DATA records for `xl migrate-receive`, from pages
//! in any order. The texts that xl exchanges round the stream are in [`handshake`].
#![forbid(unsafe_code)]

mod batches;
mod configuration;
mod cursor;
mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod joiner;
mod page_word;
mod record;
mod splitter;
pub mod write;

pub use batches::fill_batch;
pub use configuration::{Configuration, DOMAIN_PAGES_MAX, is_name, is_uuid};
pub use error::{Layer, StreamError};
pub use joiner::{Arrived, JoinError, Joined, Joiner, Record};
pub use page_word::{PageKind, PageWord};
pub use record::{OPTIONAL_BYTES_MAX, RECORD_BYTES_MAX, RECORD_PAGES_MAX, libxc, libxl};
pub use splitter::{
    DomainKind, Progress, Sink, Splitter, Step, XL_HEADER_BYTES, configuration_bytes,
};
