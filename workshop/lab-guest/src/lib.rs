//! What a Linux guest of the lab does besides the memory work that all guests share: disks, files,
//! the page cache, the network. `main.rs` is the `/init` that puts them together inside the guest.

pub mod cache;
pub mod churn;
pub mod count;
pub mod disk;
pub mod files;
pub mod memory;
pub mod net;
pub mod pair;
pub mod record;
pub mod storing;

pub use guest_pages::{PAGE_BYTES, PAGE_WORDS, burn, content, orders, pace, random, swing, writer};
