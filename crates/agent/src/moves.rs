//! VMs that leave this host or arrive here, and the switchovers that were interrupted.

pub(crate) mod arrivals;
pub(crate) mod history;
pub(crate) mod migrations;
pub(crate) mod recovery;
