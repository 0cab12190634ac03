//! Many VMs moved as one operation: asked for, planned, watched, ended.

mod report;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Audit;
use crate::bounds::Bounds;
use crate::migration::{
    Compress, MigrateRequest, Outcome, Phase, Progress, TapChoice, default_downtime_ms,
};
use crate::sharing::Sharing;
use crate::slowing::Slowing;
use crate::storage::FromStorage;
pub use report::{Figures, GangReport, MoveReport};

/// Most VMs that leave one host, or arrive at one, at a time.
pub const PARALLEL_MAX: u16 = 16;

/// One VM that shall move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WantedMove {
    /// Its name.
    pub vm: String,
    /// The host that it is on, where two have a VM of that name.
    #[serde(default)]
    pub from: Option<String>,
    /// The host that it shall go to.
    pub to: String,
}

/// A host whose VMs shall all leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Evacuation {
    /// The host.
    pub host: String,
    /// Where its VMs may go; by default to every other host of the peers file.
    #[serde(default)]
    pub to: Vec<String>,
}

/// How the VMs of a gang are moved: as in [`MigrateRequest`], without what
/// makes sense for one VM alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GangOptions {
    /// See [`MigrateRequest::lanes`].
    pub lanes: Option<u16>,
    /// See [`MigrateRequest::downtime_ms`].
    pub downtime_ms: u64,
    /// See [`MigrateRequest::blackout_max_s`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blackout_max_s: Option<u64>,
    /// See [`MigrateRequest::slowing`]; a deadline counts for each VM from its own
    /// begin.
    pub slowing: Slowing,
    /// See [`MigrateRequest::compress`].
    pub compress: Compress,
    /// See [`MigrateRequest::tap`].
    pub tap: TapChoice,
    /// See [`MigrateRequest::shared_disks`].
    pub shared_disks: bool,
    /// See [`MigrateRequest::disks`].
    pub disks: Option<String>,
    /// See [`MigrateRequest::create_disks`].
    pub create_disks: bool,
    /// See [`MigrateRequest::timeout_s`]; of each VM.
    pub timeout_s: Option<u64>,
    /// What each migration may use.
    pub bounds: Bounds,
    /// See [`MigrateRequest::overcommit_memory`].
    pub overcommit_memory: bool,
    /// See [`MigrateRequest::sharing`].
    pub sharing: Sharing,
    /// See [`MigrateRequest::storage`].
    pub storage: FromStorage,
    /// See [`MigrateRequest::audit`].
    pub audit: Audit,
}

impl Default for GangOptions {
    fn default() -> Self {
        Self {
            lanes: None,
            downtime_ms: default_downtime_ms(),
            blackout_max_s: None,
            slowing: Slowing::default(),
            compress: Compress::default(),
            tap: TapChoice::default(),
            shared_disks: false,
            disks: None,
            create_disks: false,
            timeout_s: None,
            bounds: Bounds::default(),
            overcommit_memory: false,
            sharing: Sharing::default(),
            storage: FromStorage::default(),
            audit: Audit::default(),
        }
    }
}

impl GangOptions {
    /// What moves one VM.
    #[must_use]
    pub fn request(&self, vm: &str, to: &str) -> MigrateRequest {
        MigrateRequest {
            vm: vm.to_owned(),
            to: to.to_owned(),
            lanes: self.lanes,
            downtime_ms: self.downtime_ms,
            blackout_max_s: self.blackout_max_s,
            slowing: self.slowing,
            compress: self.compress,
            tap: self.tap,
            shared_disks: self.shared_disks,
            set: Vec::new(),
            disks: self.disks.clone(),
            create_disks: self.create_disks,
            overwrite_disks: false,
            timeout_s: self.timeout_s,
            bounds: self.bounds.clone(),
            incoming_qmp: None,
            overcommit_memory: self.overcommit_memory,
            sharing: Sharing { together: true, ..self.sharing.clone() },
            storage: self.storage.clone(),
            audit: self.audit,
        }
    }
}

/// `POST /v1/gangs`: VMs by name, or all of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GangRequest {
    /// VMs by name.
    #[serde(default)]
    pub moves: Vec<WantedMove>,
    /// All VMs of a host, placed by free memory.
    #[serde(default)]
    pub evacuate: Option<Evacuation>,
    /// How they are moved.
    #[serde(default)]
    pub options: GangOptions,
    /// How many leave one host at a time, and how many arrive at one.
    #[serde(default = "default_parallel")]
    pub parallel: u16,
    /// Whether the first that fails ends those that have not moved yet.
    #[serde(default)]
    pub atomic: bool,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// One VM's preparation and end fit under the other's pages, and each still has
/// half of the link.
fn default_parallel() -> u16 {
    2
}

/// One VM of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedMove {
    /// Its name.
    pub vm: String,
    /// The host that it is on.
    pub from: String,
    /// The host that it goes to.
    pub to: String,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Of it, what it uses: what is expected to cross the network, before
    /// compression.
    pub used_bytes: u64,
    /// Of that, what is expected not to be sent; none if nobody knows.
    #[serde(default)]
    pub shared_bytes: Option<u64>,
    /// Why not.
    #[serde(default)]
    pub shared: Option<SharedParts>,
}

/// What of a VM is expected not to be sent: an estimate, from samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedParts {
    /// VMs at the destination have it.
    pub held_bytes: u64,
    /// Of the rest, what is more than once in this VM.
    pub within_bytes: u64,
    /// Of the rest, what VMs of the gang bring that come before it in the plan.
    pub common_bytes: u64,
}

impl SharedParts {
    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held_bytes.saturating_add(self.within_bytes).saturating_add(self.common_bytes)
    }
}

/// A host's memory, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRoom {
    /// The host.
    pub host: String,
    /// What it can give to VMs that come.
    pub free_bytes: u64,
    /// Of it, what is left when all are there.
    pub left_bytes: u64,
}

/// What a gang does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GangPlan {
    /// Each VM, the largest first.
    pub moves: Vec<PlannedMove>,
    /// The hosts that VMs go to.
    pub rooms: Vec<HostRoom>,
    /// What to know before.
    pub notes: Vec<String>,
}

/// What `POST /v1/gangs` and `POST /v1/gangs/ID/resume` answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GangStarted {
    /// The gang, for watching and cancelling it; none after a dry run.
    pub id: Option<String>,
    /// What it does.
    pub plan: GangPlan,
}

/// How far one VM of a gang is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveState {
    /// Its turn has not come.
    Waiting,
    /// It moves.
    Moving,
    /// It is at its destination.
    Done,
    /// It is not, and why is said.
    Failed,
    /// It was taken back, or never begun, since the gang was cancelled or
    /// another one failed.
    Cancelled,
}

impl MoveState {
    /// Whether nothing comes any more.
    #[must_use]
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Waiting | Self::Moving)
    }
}

/// One VM of a gang.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MoveProgress {
    /// Its name.
    pub vm: String,
    /// The host that it leaves.
    pub from: String,
    /// The host that it goes to.
    pub to: String,
    /// Its RAM.
    pub ram_bytes: u64,
    /// How far it is.
    pub state: MoveState,
    /// Its migration, at the host that it leaves.
    pub migration: Option<String>,
    /// Why it failed or was cancelled.
    pub reason: Option<String>,
    /// How its migration goes, while it moves.
    pub progress: Option<Progress>,
}

/// All VMs of a gang together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GangTotals {
    /// VMs whose turn has not come.
    pub waiting: usize,
    /// VMs that move.
    pub moving: usize,
    /// VMs at their destination.
    pub done: usize,
    /// VMs that failed.
    pub failed: usize,
    /// VMs that were taken back or never begun.
    pub cancelled: usize,
    /// What all VMs use, as it was planned.
    pub used_bytes: u64,
    /// Of it, what belongs to VMs that have arrived, and the part of the others
    /// that has.
    pub moved_bytes: u64,
    /// Bytes per second on the lanes of all.
    pub wire_bytes_per_s: f64,
}

/// How a gang ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GangOutcome {
    /// All VMs are at their destinations.
    Done,
    /// Some are not, and each says why.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// Its agent ended before it did: it can be taken up again.
    Interrupted,
}

/// One line of `GET /v1/gangs/ID/progress` (NDJSON) and what `GET /v1/gangs/ID`
/// answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct GangProgress {
    /// The gang.
    pub id: String,
    /// Seconds since it was begun, or taken up again.
    pub elapsed_s: f64,
    /// Each VM.
    pub moves: Vec<MoveProgress>,
    /// All of them together.
    pub totals: GangTotals,
    /// What to know of it.
    pub notes: Vec<String>,
    /// Set once it ended.
    pub outcome: Option<GangOutcome>,
}

impl MoveProgress {
    /// The part of it that is at its destination, from 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        match (self.state, &self.progress) {
            (MoveState::Done, _) => 1.0,
            (MoveState::Moving, Some(progress)) if progress.phase > Phase::Prepare => {
                (progress.percent / 100.0).clamp(0.0, 1.0)
            }
            _ => 0.0,
        }
    }
}

impl From<&Outcome> for MoveState {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Failed(_) => Self::Failed,
            Outcome::Cancelled => Self::Cancelled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_be_short_and_a_wrong_word_is_refused() {
        let request: GangRequest =
            serde_json::from_str(r#"{"moves":[{"vm":"a","to":"y"}]}"#).unwrap();
        assert_eq!((request.parallel, request.atomic, request.dry_run), (2, false, false));
        assert_eq!(request.options, GangOptions::default());
        let request: GangRequest = serde_json::from_str(
            r#"{"evacuate":{"host":"x"},"options":{"downtime_ms":50},"parallel":4}"#,
        )
        .unwrap();
        assert_eq!(request.options.downtime_ms, 50);
        for wrong in [
            r#"{"moves":[{"vm":"a","to":"y","colour":1}]}"#,
            r#"{"evacuate":{"host":"x"},"options":{"set":["a=b"]}}"#,
            r#"{"evacuate":{}}"#,
        ] {
            assert!(serde_json::from_str::<GangRequest>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_vm_is_moved_as_one_alone_would_be() {
        let ours = GangOptions::default().request("v", "b");
        let mut theirs: MigrateRequest = serde_json::from_str(r#"{"vm":"v","to":"b"}"#).unwrap();
        theirs.sharing.together = true;
        assert_eq!(serde_json::to_value(ours).unwrap(), serde_json::to_value(theirs).unwrap());
    }
}
