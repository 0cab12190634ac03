//! Content that need not be sent: pages that come by name, and are found on this
//! host.
//!
//! A source names the pages of QEMU's first pass. What this host has is copied
//! from the RAM of the VM that has it, named once more, and placed only if the name
//! is the same. What is on its way here already, for another VM or another page, is
//! waited for. Else, if the VM may have content of the rack, its directory is asked,
//! and what another host has or gets comes from there. All else is asked of the
//! source. A name that nobody has, a copy that has changed, a VM that never comes, a
//! host that is gone cost time, not content.

mod blocks;
mod brought;
mod copies;
mod exchange;
mod in_flight;
mod kept;
mod outbox;
mod recipient;
mod resolve;
mod settle;
mod sharing;

pub use blocks::Blocks;
pub(crate) use exchange::{Exchange, Page, Waiter};
pub(crate) use in_flight::{CLAIM_MAX, Provider};
pub use kept::{Known, WatchError};
pub use outbox::Outbox;
pub(crate) use recipient::{Place, Recipient};
pub use resolve::{Arriving, Resolving};
pub use sharing::Sharing;
