//! A domain of Xen that `xl migrate` sends, and that two agents carry.
//!
//! ```text
//! source                                     destination
//! xl has sent the domain's configuration
//!        receive-domain -------------------> starts xl's receiver, opens its journal
//!        <------------------------ carrying
//!        tail ..., epoch (where it starts) -> writes to the receiver, in order
//!        pages by lanes, or their names ---> writes them as records of their own
//!        <------------------- answers, late
//!        placed ---------------------------> audits; the receiver is ready
//!        <-- loaded, go, running ... ------- the switchover's messages
//! ```

use data_threads::SchedParams;
use serde::{Deserialize, Serialize};
use switchover::MigrationId;

use crate::control::{AuditOrder, SharingOrder};

/// The order to receive a domain.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReceiveDomain {
    /// The migration's id, for both ends' logs.
    pub migration: String,
    /// The id in both sides' journals.
    pub switchover: MigrationId,
    /// The port of the source agent, on the host that its connection comes from.
    pub agent_port: u16,
    /// The source agent's name.
    pub from: String,
    /// The domain's name.
    pub domain: String,
    /// Its UUID.
    pub uuid: String,
    /// Its page numbers are below.
    pub pages_max: u32,
    /// How the destination's data threads are scheduled.
    #[serde(default)]
    pub terms: SchedParams,
    /// What is compared before the domain is given up.
    #[serde(default)]
    pub audit: AuditOrder,
    /// See [`Prepare`](crate::Prepare).
    #[serde(default)]
    pub hashes: Vec<String>,
    /// Pages of data may be sent by name.
    pub sharing: Option<SharingOrder>,
}
