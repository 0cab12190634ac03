//! Pages whose content is also on the VM's own disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bounds::BitRate;
use crate::helper_budget::HelperBudget;

/// Whether pages are read from the VM's disks at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReadDisks {
    /// Those that the guest's helper names, where the disks can be read.
    ///
    /// The report does not mention it if there is no helper.
    #[default]
    Auto,
    /// None are.
    Off,
    /// As `Auto`, but the report has the reason if pages were not read.
    On,
}

/// How the migration uses storage that both hosts see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FromStorage {
    /// Whether pages are read from it.
    pub read: ReadDisks,
    /// The highest read rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<BitRate>,
    /// The percentage of the pages on disks that is read from them; the source sends the rest.
    ///
    /// By default both provide what they can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<u8>,
    /// The resources that the helper may use in the guest for its answer.
    pub helper: HelperBudget,
}
