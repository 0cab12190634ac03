//! Proof, page by page, that what arrived is what QEMU handed over.
//!
//! Each end of a migration keeps a [`Ledger`]: one entry of 8 bytes for each page.
//! The source records what QEMU handed over last, and the destination what it placed last, after
//! decoding and regardless of the delivery. They are compared before the source gives up the VM, so
//! a difference ends the migration while the source still has it. A page that the source reread
//! from the VM's memory, because the destination lacks it, is recorded as sent.
//!
//! ```text
//! page            entry = fingerprint of its content (40 bits), and its origin
//! range           digest = sum over its 4,096 pages of mix(page, fingerprint)
//! block           total = sum over its ranges
//! ```
//!
//! A digest is a sum, so each entry updates it, in any order and from any thread. Once the VM has
//! stopped, no page has to be hashed: each end adds up its digests, and the source sends one number
//! for each RAM block. Only if one differs do both ends compare ranges and then pages. So a VM of 1
//! TiB has hardly more downtime from the audit than one of 1 GiB.
//!
//! An audit doesn't detect a write that QEMU itself never handed over, or a change to the
//! destination's RAM after a page was placed. The *deep* audit also reads that RAM back.
//!
//! The hash is fast and not cryptographic, because the audit looks for faults of our own. Content
//! that is taken from elsewhere by name is verified with a keyed hash (crate `content`).

mod difference;
mod entry;
mod fingerprint;
mod handed_over;
mod hash;
mod ledger;
mod numbering;
mod reread;

pub use difference::Difference;
pub use entry::{Delivery, Entry};
pub use fingerprint::Fingerprint;
pub use handed_over::{HandedOver, NotKept};
pub use hash::Hash;
pub use ledger::{BlockLedger, Ledger, RANGE_PAGES, RangeComparison, Writing};
pub use reread::Rereading;
