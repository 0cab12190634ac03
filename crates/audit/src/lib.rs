//! Proof, page by page, that what arrived is what QEMU handed over.
//!
//! Each end of a migration keeps a [`Ledger`]: one entry of 8 bytes for each page.
//! The source notes what QEMU handed over last, the destination what it placed
//! last, after all decoding and by whichever delivery it came. Before the VM is
//! given up, both are compared. A difference ends the migration while the source
//! still has the VM. A page that the source has read from the VM's memory once more,
//! for a destination that lacks it, is noted as it was sent.
//!
//! ```text
//! page            entry = fingerprint of its content (40 bits), and where from
//! range           digest = sum over its 4,096 pages of mix(page, fingerprint)
//! block           total = sum over its ranges
//! ```
//!
//! A digest is a sum, so it is brought up to date with each entry, in any order,
//! from any thread. When the VM has stopped nothing has to be hashed or added up:
//! the source sends one number for each RAM block, and only if one differs do both
//! ends go on to ranges and then to pages. That costs a VM of 1 TiB no more of its
//! downtime than one of 1 GiB.
//!
//! What an audit doesn't show: a write that QEMU itself never handed over, and what
//! changes the destination's RAM after it was written there. The *deep* audit also
//! reads that RAM back.
//!
//! Fingerprints are made by a hash that is fast and not cryptographic: an audit is
//! there to find faults of ours. Content that is taken from elsewhere because of its name
//! is checked by a keyed hash (crate `content`).

mod difference;
mod entry;
mod fingerprint;
mod handed_over;
mod hash;
mod ledger;
mod reread;

pub use difference::Difference;
pub use entry::{Delivery, Entry};
pub use fingerprint::Fingerprint;
pub use handed_over::{HandedOver, NotKept};
pub use hash::Hash;
pub use ledger::{BlockLedger, Ledger, RANGE_PAGES, Writing};
pub use reread::Rereading;
