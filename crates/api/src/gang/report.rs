//! The report of a gang.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{GangOptions, GangOutcome, MoveState};
use crate::bounds::BitRate;

/// The costs of one migration of a gang.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Figures {
    /// From its command to its end.
    pub total_s: f64,
    /// The VM's downtime.
    pub downtime_ms: Option<f64>,
    /// Bytes written to all lanes and the control connection.
    pub wire_bytes: u64,
    /// Page bodies that QEMU handed over, in bytes.
    pub body_bytes: u64,
    /// Of those, the bodies that were not sent because the destination had their content.
    pub named_bytes: u64,
    /// Features that were not used, and why.
    pub notes: Vec<String>,
}

/// One VM of a gang that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveReport {
    /// Its name.
    pub vm: String,
    /// The host that it left.
    pub from: String,
    /// The host that it was to go to.
    pub to: String,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Of that, what it used.
    pub used_bytes: u64,
    /// How it ended.
    pub state: MoveState,
    /// Its migration, whose report is at the host that it left.
    pub migration: Option<String>,
    /// Why it failed or was cancelled.
    pub reason: Option<String>,
    /// Whether it is in doubt: it may run at either host.
    #[serde(default)]
    pub in_doubt: bool,
    /// The part of the gang's limit that its migration may use; none if the gang has no limit, or
    /// the migration has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bits_per_s: Option<BitRate>,
    /// The costs of its migration; none if its source host could not be queried.
    pub figures: Option<Figures>,
}

/// Everything recorded of a gang; its agent also saves it while the gang runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GangReport {
    /// The gang.
    pub id: String,
    /// When it was started, seconds since 1970.
    pub started_unix_s: u64,
    /// From when it was started, or resumed, to its end.
    pub total_s: f64,
    /// How many VMs left one host, and arrived at one, at a time.
    pub parallel: u16,
    /// Whether the first failure cancelled the others.
    pub atomic: bool,
    /// The host that it evacuates, if that was requested.
    pub evacuates: Option<String>,
    /// How its VMs were moved.
    pub options: GangOptions,
    /// How it ended; none while it runs.
    pub outcome: Option<GangOutcome>,
    /// Each VM.
    pub moves: Vec<MoveReport>,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

impl GangReport {
    /// Bytes on the wire, of all migrations whose figures are known.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        self.figures().map(|figures| figures.wire_bytes).sum()
    }

    /// The VM with the longest downtime, and that downtime in milliseconds.
    #[must_use]
    pub fn longest_downtime(&self) -> Option<(&str, f64)> {
        let gone = self
            .moves
            .iter()
            .filter_map(|one| Some((one.vm.as_str(), one.figures.as_ref()?.downtime_ms?)));
        gone.max_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// Bytes that were not sent because destinations had their content.
    #[must_use]
    pub fn named_bytes(&self) -> u64 {
        self.figures().map(|figures| figures.named_bytes).sum()
    }

    fn figures(&self) -> impl Iterator<Item = &Figures> {
        self.moves.iter().filter_map(|one| one.figures.as_ref())
    }
}
