//! What a lab guest does, in parts that need no guest: its orders, the content
//! of its pages, and the writer that changes them, at leisure or with all of a CPU. `main.rs` is the `/init`
//! that puts them together inside the guest.

pub mod burn;
pub mod cache;
pub mod churn;
pub mod content;
pub mod disk;
pub mod files;
pub mod memory;
pub mod net;
pub mod orders;
pub mod pair;
pub mod random;
pub mod record;
pub mod storing;
pub mod swing;
pub mod writer;

/// Bytes in a page.
pub const PAGE_BYTES: usize = 4096;

/// Words in a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
