//! What pages contain, by name. A page of a VM can come from anywhere if its
//! name is right: from another VM on the host, from another host of the rack,
//! from shared storage.

mod name;

pub use name::{Domain, Key, NAME_BYTES, Name};
