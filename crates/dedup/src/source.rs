//! The source's half of deduplication: names for pages that the destination may have already.
//!
//! [`Naming`] makes the names, for pages that QEMU hands over and pages that disks have. Most pages
//! of a VM that was scanned at rest have their names already ([`NamedBefore`]). A [`Stage`] stands
//! between the queue and the lanes. A lane hands it the batches that it takes ([`AtLane`]). The
//! stage sends queries by name, reads the answers, and has lanes send what the destination
//! requests. An [`Announcer`] works ahead of QEMU.

mod announcer;
mod at_lane;
mod errand;
mod finds;
mod first_pass;
mod guest_page_cache;
mod named_before;
mod naming;
mod pending;
mod reread;
mod reserved;
mod spare;
mod stage;
mod storage_notes;
#[cfg(test)]
mod tests;

pub use announcer::{Announcer, after};
pub use at_lane::AtLane;
pub use errand::Errand;
pub use guest_page_cache::{GuestPageCache, GuestQuery, Room};
pub use named_before::NamedBefore;
pub use naming::{Naming, Plan, Waits};
pub use stage::Stage;
pub use storage_notes::StorageNotes;
