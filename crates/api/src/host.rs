//! The agent itself and the hosts it knows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::vm::VmStatus;

/// What `GET /v1/host` answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    /// The host's name.
    pub name: String,
    /// The rack it stands in.
    pub rack: Option<String>,
    /// Droveway's version.
    pub version: String,
    /// The agent's process.
    pub pid: u32,
    /// Where other agents reach it.
    pub listen: String,
    /// Addresses of the network cards that carry data.
    pub nics: Vec<String>,
    /// Hosts that VMs can be moved to.
    pub peers: Vec<PeerInfo>,
}

/// One other host, from the peers file.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct PeerInfo {
    /// Its name.
    pub name: String,
    /// The rack it stands in.
    pub rack: Option<String>,
    /// Where its agent listens.
    pub address: String,
}

/// What `GET /v1/hosts/HOST` answers: a host as its own agent sees it, this one or
/// another of the peers file.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostCensus {
    /// The host.
    pub name: String,
    /// The rack it stands in.
    pub rack: Option<String>,
    /// Memory that it can give to VMs that come; none if its kernel does not say.
    pub free_bytes: Option<u64>,
    /// Its VMs, those that are arriving among them.
    pub vms: Vec<HostVm>,
}

/// A VM, as far as it concerns other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostVm {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub status: VmStatus,
    /// The migration that moves it now.
    pub migration: Option<String>,
    /// Guest RAM.
    pub ram_bytes: u64,
    /// Of it, what the VM has touched.
    pub used_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
}
