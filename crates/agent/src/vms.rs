//! The VMs of this host: which there are, what is noted of each on disk, and the QEMUs that run
//! them.

pub(crate) mod holdings;
pub(crate) mod logs;
pub(crate) mod ram_before;
pub(crate) mod record;
pub(crate) mod registry;
pub(crate) mod scopes;
pub(crate) mod vm;
