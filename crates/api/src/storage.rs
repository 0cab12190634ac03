//! Pages that a VM's own disks have.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bounds::BitRate;
use crate::helper_budget::HelperBudget;

/// Whether pages are read from the VM's disks at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReadDisks {
    /// Those that the guest's helper names, where the disks can be read. Without a
    /// helper nothing is said of it.
    #[default]
    Auto,
    /// They are not.
    Off,
    /// As `Auto`, and the report says why not where they are not.
    On,
}

/// How storage is used that both hosts see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FromStorage {
    /// Whether it is.
    pub read: ReadDisks,
    /// The most that is read of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<BitRate>,
    /// So many percent of what disks have are read from them, and the rest comes over
    /// the network. Without it, both bring what they can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<u8>,
    /// What the helper in the guest may use up for its answer.
    pub helper: HelperBudget,
}
