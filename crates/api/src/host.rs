//! The agent itself and the hosts it knows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::migration::Progress;
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
    /// The address at which other agents reach it.
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
    /// The address of its agent.
    pub address: String,
}

/// What `GET /v1/hosts/HOST` answers: this host or one from the peers file, as its own agent
/// sees it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostCensus {
    /// The host.
    pub name: String,
    /// The rack it stands in.
    pub rack: Option<String>,
    /// Memory available for arriving VMs; none if its kernel does not report it.
    pub free_bytes: Option<u64>,
    /// Its VMs, including those that are arriving.
    pub vms: Vec<HostVm>,
    /// The migrations from it that have not ended.
    #[serde(default)]
    pub moving: Vec<Progress>,
}

/// A VM, as other hosts see it.
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
    /// Of that, what the VM has touched.
    pub used_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Whether QEMU's program was replaced on disk since it started, as far as that is known.
    #[serde(default)]
    pub program_replaced: bool,
}
