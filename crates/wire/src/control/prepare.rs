//! The order to prepare for a VM, and the answer to it.

use content::Domain;
use data_threads::SchedParams;
use facts::disks::{Allowed, Challenge, Moving};
use facts::shape::Shape;
use serde::{Deserialize, Serialize};
use switchover::MigrationId;

use crate::part::Part;

/// The order to prepare for a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepare {
    /// The migration's id, for both ends' logs and reports.
    pub migration: String,
    /// The id in both sides' journals, which no other migration ever has.
    pub switchover: MigrationId,
    /// The port of the source agent, on the host that its connection comes from.
    pub agent_port: u16,
    /// The source agent's name.
    pub from: String,
    /// The VM's name.
    pub vm: String,
    /// QEMU and its arguments, as the user typed them.
    pub argv: Vec<String>,
    /// The directory that relative paths refer to.
    pub cwd: String,
    /// Texts to replace in `argv`.
    pub overrides: Vec<(String, String)>,
    /// The source QEMU's version.
    pub qemu: String,
    /// The configuration of the live VM.
    pub shape: Part<Shape>,
    /// How the destination can verify that storage is shared.
    pub disks: Part<Vec<Challenge>>,
    /// The operator asserts that it is.
    pub shared_disks: bool,
    /// Disks that move; lanes number them in this order.
    pub moving: Part<Vec<Moving>>,
    /// What the operator allows for their images.
    pub allowed: Part<Allowed>,
    /// QMP socket of a QEMU that another manager started there.
    pub incoming_qmp: Option<String>,
    /// The operator asserts that less memory than the VM's RAM is enough.
    #[serde(default)]
    pub overcommit: bool,
    /// The operator accepts that the VM's taps may be missing, or down.
    #[serde(default)]
    pub accept_missing_taps: bool,
    /// How the destination's data threads are scheduled.
    #[serde(default)]
    pub terms: SchedParams,
    /// Pages may be sent by name.
    pub sharing: Option<SharingOrder>,
    /// Pages may be read from the VM's own disks.
    pub storage: Option<StorageOrder>,
    /// The sharing domain that the VM belongs to from now on.
    #[serde(default)]
    pub share_domain: Domain,
    /// The VM has a port for the guest's helper in addition to `argv`.
    #[serde(default)]
    pub guest_port: bool,
    /// What is compared before the VM is loaded.
    #[serde(default)]
    pub audit: AuditOrder,
    /// The hashes that the audit may use, besides XXH3.
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
    /// By fingerprints of what was placed.
    On,
    /// Also by reading RAM back.
    Deep,
}

/// The VMs that may share content, and how it is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingOrder {
    /// The domain that the VM belongs to.
    pub domain: Domain,
    /// Proves that both ends make names with the same key.
    pub print: String,
    /// Content may be provided by other hosts of the destination's rack.
    #[serde(default)]
    pub rack: bool,
    /// Sharing was not requested explicitly: a destination that isn't configured for it reports
    /// nothing.
    #[serde(default)]
    pub auto: bool,
    /// Share only if there is content to share.
    #[serde(default)]
    pub if_any: bool,
    /// If there is nothing yet, the source may be ordered to start later.
    #[serde(default)]
    pub may_sleep: bool,
}

/// The disks that pages may be read from, and how their content is named.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageOrder {
    /// QEMU's paths of the devices; places refer to them by index.
    pub devices: Vec<String>,
    /// A secret that keys the names if content is not shared, in hex.
    pub secret: String,
    /// The limit of bytes read per second; none means no limit.
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

/// The destination's answer when it is ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prepared {
    /// The token that identifies lanes, in hex.
    pub token: String,
    /// The destination QEMU's version.
    pub qemu: String,
    /// Features not used at the destination, and why.
    pub notes: Vec<String>,
    /// Why pages are not read from storage, or only slowly.
    #[serde(default)]
    pub storage_notes: Vec<String>,
    /// Pages may be sent by name, as ordered.
    #[serde(default)]
    pub sharing: bool,
    /// Whether pages are read from each of the ordered disks.
    #[serde(default)]
    pub storage: Vec<bool>,
    /// The hash of the audit; none means XXH3.
    pub hash: Option<String>,
    /// Pages may be sent as deltas.
    #[serde(default)]
    pub deltas: bool,
    /// Pages' names may be sent with their bodies.
    #[serde(default)]
    pub names_with_bodies: bool,
}
