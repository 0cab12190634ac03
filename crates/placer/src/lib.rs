//! What writes pages into the destination's RAM.
//!
//! Lanes deliver batches in any order, some twice, and the same page in several
//! epochs at once. All their receivers share one [`Placer`], which turns that
//! into consistent RAM by three rules:
//!
//! 1. **The newest epoch wins.** For each page it keeps the epoch of what it
//!    last began to write. Older content is dropped. Content of the same epoch
//!    is the same content again, after a lane died before it was acknowledged,
//!    and is written again.
//! 2. **One writer for a page.** A batch locks the range from its first to its
//!    last page while it looks at epochs and writes. One lock for the span, not
//!    one for each run: QEMU sweeps its RAM upwards, so the spans of batches of
//!    one pass are disjoint however scattered their pages are, and batches of
//!    different passes are rarely under way together.
//! 3. **Nobody waits for a peer while holding a lock.** A batch is in memory as a
//!    whole before it is placed. So a lane that stalls or dies stops no other, and
//!    RAM never holds half a page (the source repeats what was not acknowledged).
//!
//! Placement is *mapped*, into RAM that this process can write, or
//! *inline*: as records of QEMU's own stream, which the [`Feeder`] writes to the
//! QEMU that is waiting for it. There, the place in the queue is what counts,
//! and it is taken under the same lock as the look at the epochs.
//!
//! A page of zeros for memory that is zero already is not written: holes stay
//! holes, at both ends. RAM is not read to find that out: the placer knows what
//! it wrote, and takes what was there before from the kernel's page map.

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
pub use placer::{Counts, Placer, host_bytes};

/// What came of an attempt to place pages.
type Placed = Result<Counts, PlaceError>;
