//! What remains of a gang.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{GangOptions, GangOutcome, MoveState};

/// What a migration took, for its gang.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Figures {
    /// From its command to its end.
    pub total_s: f64,
    /// How long the VM was gone.
    pub downtime_ms: Option<f64>,
    /// Bytes written to all lanes and the control connection.
    pub wire_bytes: u64,
    /// Page bodies that QEMU handed over, in bytes.
    pub body_bytes: u64,
    /// Of them, those that were not sent, because the destination had their
    /// content.
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
    /// Of it, what it used.
    pub used_bytes: u64,
    /// How it ended.
    pub state: MoveState,
    /// Its migration; its report is at the host that it left.
    pub migration: Option<String>,
    /// Why it failed or was cancelled.
    pub reason: Option<String>,
    /// What it took; none if nobody could be asked.
    pub figures: Option<Figures>,
}

/// The whole story of a gang; also what its agent keeps of it while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GangReport {
    /// The gang.
    pub id: String,
    /// When it was begun, seconds since 1970.
    pub started_unix_s: u64,
    /// From its begin, or from when it was taken up again, to its end.
    pub total_s: f64,
    /// How many left a host and arrived at one at a time.
    pub parallel: u16,
    /// Whether the first that failed ended the others.
    pub atomic: bool,
    /// How its VMs were moved.
    pub options: GangOptions,
    /// How it ended; none while it runs.
    pub outcome: Option<GangOutcome>,
    /// Each VM.
    pub moves: Vec<MoveReport>,
    /// What to know of it.
    pub notes: Vec<String>,
}

impl GangReport {
    /// Bytes on the wire, of all that is known.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        self.figures().map(|figures| figures.wire_bytes).sum()
    }

    /// The VM that was gone for longest, and for how long.
    #[must_use]
    pub fn longest_downtime(&self) -> Option<(&str, f64)> {
        let gone = self
            .moves
            .iter()
            .filter_map(|one| Some((one.vm.as_str(), one.figures.as_ref()?.downtime_ms?)));
        gone.max_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// Bytes that were not sent, because destinations had their content.
    #[must_use]
    pub fn named_bytes(&self) -> u64 {
        self.figures().map(|figures| figures.named_bytes).sum()
    }

    fn figures(&self) -> impl Iterator<Item = &Figures> {
        self.moves.iter().filter_map(|one| one.figures.as_ref())
    }
}
