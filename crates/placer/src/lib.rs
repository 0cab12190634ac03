//! Writes pages into the destination's RAM.
//!
//! Lanes deliver batches in any order, some twice, and the same page in several epochs at once.
//! All their receivers share one [`Placer`], which makes consistent RAM of them by three rules:
//!
//! 1. **The newest epoch wins.** The placer keeps the epoch of each page's latest write, from when
//!    it started. Older content is dropped. Content of the same epoch is the same content, sent
//!    because a lane died before it was acknowledged, and is written again.
//! 2. **One writer for a page.** A batch locks the range from its first to its last page while it
//!    checks epochs and writes. One lock covers the span, instead of one for each run: QEMU sweeps
//!    its RAM upwards, so spans of batches of one pass are disjoint, however scattered their pages
//!    are, and batches of different passes are rarely in flight together.
//! 3. **No thread waits for a peer while it holds a lock.** A whole batch is in memory before it is
//!    placed. So a lane that stalls or dies stops no other, and RAM never holds half a page (the
//!    source repeats what was not acknowledged).
//!
//! Placement is *mapped*, into RAM that this process can write, or *inline*, as records of QEMU's
//! own stream, which the [`Feeder`] writes to the waiting QEMU. Inline, the place in the queue
//! decides, and it is taken under the lock under which epochs are checked.
//!
//! A zero page for memory that is zero already is not written: holes stay holes, at both ends.
//! RAM is not read to find that out: the placer knows what it wrote, and takes what was there
//! before from the kernel's page map.

#![forbid(unsafe_code)]

mod block;
mod error;
mod feeder;
mod inline;
mod mapped;
mod place;
mod placer;
mod versions;

pub use block::{BlockPlan, Placement};
pub use error::{FeederError, PlaceError};
pub use feeder::{Feeder, FeederHandle};
pub use placer::{Placer, host_bytes};
