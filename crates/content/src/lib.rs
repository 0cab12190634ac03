//! What pages contain, by name. A page of a VM can come from anywhere if its
//! name is right: from another VM on the host, from another host of the rack,
//! from shared storage.
//!
//! An [`Index`] knows who on this host has which content. A [`Scanner`] keeps it
//! for VMs that run here, and a [`Tally`] says from samples of it what a gang would
//! share.

mod estimate;
mod index;
mod name;
mod scan;

pub use estimate::{Estimate, Sample, Tally};
pub use index::{Holder, Index, Member, Scanned};
pub use name::{Domain, Key, NAME_BYTES, Name};
pub use scan::{GivingWay, Scanner};
