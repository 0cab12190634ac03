//! A plan of how a VM gets another QEMU on its host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// It is copied, as far as only its QEMU can map it.
    Copied,
    /// The VM can't get another QEMU while it runs.
    Not,
}
