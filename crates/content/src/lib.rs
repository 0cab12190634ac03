//! Page content by name. A VM's page can come from any provider if its name is right: another VM
//! on the host, another host of the rack, or shared storage.
//!
//! An [`Index`] knows which VM on this host has which content. A [`Scanner`] maintains it for VMs
//! that run here, and a [`Tally`] estimates from samples what a gang would share.

mod estimate;
mod index;
mod name;
mod scan;

pub use estimate::{Estimate, Sample, Tally};
pub use index::{Holder, Index, Member, Scanned};
pub use name::{Domain, Key, NAME_BYTES, Name};
pub use scan::{GivingWay, Scanner};
