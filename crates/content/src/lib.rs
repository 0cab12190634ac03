//! Page content by name. A VM's page can come from any provider if its name is right: another VM
//! on the host, another host of the rack, or shared storage.
//!
//! An [`Index`] knows which VM on this host has which content. A [`Scanner`] maintains it for VMs
//! that run here, and keeps [`EarlierNames`] for the time when they move. A [`Tally`] estimates from
//! samples what a gang would share.

#![forbid(unsafe_code)]

mod earlier_names;
mod estimate;
mod fingerprint;
mod index;
mod name;
mod scan;

pub use earlier_names::{EarlierNames, NamesReader};
pub use estimate::{Estimate, Sample, Tally};
pub use index::{Holder, Index, Member, Scanned};
pub use name::{Domain, Key, NAME_BYTES, Name};
pub use scan::{GivingWay, Scanner};
