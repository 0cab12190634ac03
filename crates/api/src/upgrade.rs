//! Another QEMU for a VM on its host: the request, and a plan of how the VM gets it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Audit;

/// `POST /v1/vms/NAME/upgrade`: a migration of the VM within its host, to another QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// QEMU's program; by default the one that the VM's command line names, as it is on disk now.
    #[serde(default)]
    pub program: Option<String>,
    /// What is compared before the former QEMU releases the VM.
    #[serde(default)]
    pub audit: Audit,
    /// Permit a VM whose QEMU loses what its guest writes meanwhile: one older than 9.0, under TCG.
    #[serde(default)]
    pub accept_lost_writes: bool,
}

/// `POST /v1/vms/NAME/plan-upgrade`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanUpgradeRequest {
    /// QEMU's program; by default the one that the VM's command line names, as it is on disk now.
    #[serde(default)]
    pub program: Option<String>,
}

/// How a VM can get another QEMU on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradePlan {
    /// The VM.
    pub vm: String,
    /// The version of the QEMU that runs it.
    pub qemu: String,
    /// The other QEMU's program.
    pub program: String,
    /// That QEMU's version.
    pub version: String,
    /// Whether the VM runs on exactly that program already. False as well if that isn't known, as
    /// with a script that starts QEMU.
    #[serde(default)]
    pub already: bool,
    /// How.
    pub how: UpgradeHow,
    /// RAM to copy, which exists twice meanwhile.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Why it can't; empty if it can.
    #[serde(default)]
    pub reasons: Vec<String>,
}

/// What becomes of a VM's RAM when it gets another QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UpgradeHow {
    /// It stays where it is, and the other QEMU maps it.
    HandedOver,
    /// All of it is copied.
    Copied,
    /// The VM can't get another QEMU while it runs.
    Not,
}
