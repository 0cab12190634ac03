//! The order to prepare for a VM, and the answer to it.

use content::Domain;
use data_threads::SchedParams;
use facts::disks::{Allowed, Challenge, Moving};
use facts::shape::Shape;
use serde::{Deserialize, Serialize};
use switchover::MigrationId;

use crate::part::Part;

/// What the source asks the destination to prepare for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepare {
    /// The migration's id, for both ends' logs and reports.
    pub migration: String,
    /// What both sides' journals call it: no other migration ever has it.
    pub switchover: MigrationId,
    /// The port that the agent that asks listens at, on the host that its
    /// connection comes from.
    pub agent_port: u16,
    /// The agent that asks.
    pub from: String,
    /// The VM's name.
    pub vm: String,
    /// QEMU and its arguments, as the user typed them.
    pub argv: Vec<String>,
    /// The directory its relative paths are meant from.
    pub cwd: String,
    /// Texts to replace in `argv`.
    pub overrides: Vec<(String, String)>,
    /// The source QEMU's version.
    pub qemu: String,
    /// What the live VM is made of.
    pub shape: Part<Shape>,
    /// How the destination can see that storage is shared.
    pub disks: Part<Vec<Challenge>>,
    /// The operator's word that it is.
    pub shared_disks: bool,
    /// Disks that move; lanes number them in this order.
    pub moving: Part<Vec<Moving>>,
    /// What the operator allows for their images.
    pub allowed: Part<Allowed>,
    /// QMP socket of a QEMU that somebody else started there.
    pub incoming_qmp: Option<String>,
    /// The operator's word that less memory than its RAM is enough.
    #[serde(default)]
    pub overcommit: bool,
    /// For the destination's data threads.
    #[serde(default)]
    pub terms: SchedParams,
    /// Pages may come by name.
    #[serde(default)]
    pub sharing: Option<SharingOrder>,
    /// Pages may be read from the VM's own disks.
    #[serde(default)]
    pub storage: Option<StorageOrder>,
    /// The sharing domain that the VM belongs to from now on.
    #[serde(default)]
    pub share_domain: Domain,
    /// The VM has a port for the helper in the guest besides what `argv` says.
    #[serde(default)]
    pub guest_port: bool,
    /// What is compared before the VM is loaded.
    #[serde(default)]
    pub audit: AuditOrder,
    /// The hashes that the audit may be made by, beside XXH3.
    #[serde(default)]
    pub hashes: Vec<String>,
}

/// How the pages that arrived are compared with those that QEMU handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditOrder {
    /// Not at all.
    #[default]
    Off,
    /// By what was placed.
    On,
    /// Also by what RAM holds.
    Deep,
}

/// With whom content may be shared, and how it is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingOrder {
    /// The domain that the VM belongs to.
    pub domain: Domain,
    /// What shows that both ends make names with the same key.
    pub print: String,
    /// Content may come from other hosts of the destination's rack.
    #[serde(default)]
    pub rack: bool,
    /// Nobody asked for it by name: what the destination is not configured for is
    /// no news.
    #[serde(default)]
    pub auto: bool,
    /// It is not worth its while unless there is anything to find.
    #[serde(default)]
    pub if_any: bool,
    /// If there is nothing yet, the source may be told to begin later on.
    #[serde(default)]
    pub may_sleep: bool,
}

/// Which disks pages may be read from, and how these are named.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageOrder {
    /// QEMU's paths of the devices; places number them in this order.
    pub devices: Vec<String>,
    /// A secret that names are made with unless content is shared, in hex.
    pub secret: String,
    /// The most bytes per second that are read; none: no bound.
    #[serde(default)]
    pub bytes_per_s: Option<u64>,
}

impl std::fmt::Debug for StorageOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { devices, bytes_per_s, .. } = self;
        f.debug_struct("StorageOrder")
            .field("devices", devices)
            .field("bytes_per_s", bytes_per_s)
            .finish_non_exhaustive()
    }
}

/// The destination's answer, when it is ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepared {
    /// What lanes identify themselves with, in hex.
    pub token: String,
    /// The destination QEMU's version.
    pub qemu: String,
    /// Features not used at the destination, and why.
    pub notes: Vec<String>,
    /// Why pages are not read from storage, or not well.
    #[serde(default)]
    pub storage_notes: Vec<String>,
    /// Pages may come by name, as was ordered.
    #[serde(default)]
    pub sharing: bool,
    /// Whether pages are read from each of the disks of the order.
    #[serde(default)]
    pub storage: Vec<bool>,
    /// The hash that the audit is made by; none: XXH3.
    #[serde(default)]
    pub hash: Option<String>,
    /// Pages may come as deltas.
    #[serde(default)]
    pub deltas: bool,
}
