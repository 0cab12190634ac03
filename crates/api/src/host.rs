//! The agent itself and the hosts it knows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
