//! The first set-up of a cluster.
//!
//! `cluster` creates certificates, the peers file, and for each host an archive of its files;
//! `place` puts these in place on the host.

pub(crate) mod agent_file;
pub(crate) mod archive;
pub(crate) mod ask;
pub(crate) mod certificates;
pub(crate) mod cluster;
pub(crate) mod hosts;
pub(crate) mod peers_file;
pub(crate) mod place;
pub(crate) mod steps;
