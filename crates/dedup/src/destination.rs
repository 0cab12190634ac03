//! The destination's half of deduplication: pages that the source sends by name.
//!
//! The source names the pages of QEMU's first pass. For each name, the first that applies:
//!
//! - Content that a VM on this host has is copied from its RAM, named again, and placed only if
//!   the name is the same.
//! - Content in flight to this host, for another VM or another page, is awaited.
//! - Content that one of the VM's disks should have is read there ([`storage`](crate::storage)).
//! - If the VM may use the rack's content, the directory is queried, and content that another
//!   host has or gets is fetched from that host.
//! - Anything else is requested from the source.
//!
//! A name that no host has, a copy that has changed, a VM that never arrives, or a host that is
//! gone costs time, not correctness.

mod blocks;
mod brought;
mod copies;
mod drained;
mod exchange;
mod in_flight;
mod kept;
mod outbox;
mod page_placer;
mod recipient;
mod resolve;
mod settle;
mod sharing;
#[cfg(test)]
mod tests;

pub use blocks::Blocks;
pub(crate) use exchange::{Exchange, Page, Waiter};
pub(crate) use in_flight::{CLAIM_MAX, Provider};
pub use kept::WatchError;
pub use outbox::Outbox;
pub use page_placer::PagePlacer;
pub use recipient::NAMED_BYTES_MAX;
pub(crate) use recipient::{AwaitedPage, Recipient};
pub use resolve::{Arriving, Resolving};
pub use sharing::Sharing;
