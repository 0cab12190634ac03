//! What the lab's guests do with their memory: their orders, the content of their pages, and the
//! writer that changes them, at a set pace or with a whole CPU. Linux guests (`lab-guest`) and
//! guests without an operating system (`bare-guest`) share it, so it allocates nothing, reads no
//! clock, and uses `std` only in its tests.
#![cfg_attr(not(test), no_std)]

pub mod burn;
pub mod content;
pub mod memory;
pub mod orders;
pub mod pace;
pub mod plan;
pub mod random;
pub mod repeated;
pub mod swing;
pub mod writer;

/// Bytes in a page.
pub const PAGE_BYTES: usize = 4096;

/// Words in a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
