//! Many VMs moved as one operation: its request, plan, progress and report.

mod report;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Audit;
use crate::bounds::{BitRate, Bounds};
use crate::migration::{
    Compress, MigrateRequest, Outcome, Phase, Progress, TapChoice, default_downtime_ms,
};
use crate::sharing::Sharing;
use crate::slowing::Slowing;
use crate::storage::FromStorage;
pub use report::{Figures, GangReport, MoveReport};

/// The most VMs that leave one host, or arrive at one, at a time.
pub const PARALLEL_MAX: u16 = 16;
/// How many do if a request leaves it open: one VM's preparation and end overlap with the other's
/// pages, and each still has half of the link.
pub const PARALLEL_DEFAULT: u16 = 2;

/// One VM to move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestedMove {
    /// Its name.
    pub vm: String,
    /// The host that it is on: needed if two hosts have a VM of that name.
    #[serde(default)]
    pub from: Option<String>,
    /// The destination host.
    pub to: String,
}

/// A host to drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Evacuation {
    /// The host.
    pub host: String,
    /// The hosts that its VMs may go to; by default every other host of the peers file.
    #[serde(default)]
    pub to: Vec<String>,
}

/// How the VMs of a gang are moved: the fields of [`MigrateRequest`] that make sense for
/// more than one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GangOptions {
    /// See [`MigrateRequest::lanes`].
    pub lanes: Option<u16>,
    /// See [`MigrateRequest::downtime_ms`].
    #[schema(minimum = 1, maximum = 60_000)]
    pub downtime_ms: u64,
    /// See [`MigrateRequest::blackout_max_s`].
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub blackout_max_s: Option<u64>,
    /// See [`MigrateRequest::slowing`]; each VM's deadline counts from the start of its own
    /// move.
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
    #[schema(minimum = 1, maximum = 86_400)]
    pub timeout_s: Option<u64>,
    /// The resources that each migration may use.
    pub bounds: Bounds,
    /// The most that all migrations of the gang send together; divided among them by what each can
    /// use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_total_bits_per_s: Option<BitRate>,
    /// See [`MigrateRequest::overcommit_memory`].
    pub overcommit_memory: bool,
    /// See [`MigrateRequest::accept_lost_writes`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub accept_lost_writes: bool,
    /// See [`MigrateRequest::accept_missing_taps`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub accept_missing_taps: bool,
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
            limit_total_bits_per_s: None,
            overcommit_memory: false,
            accept_lost_writes: false,
            accept_missing_taps: false,
            sharing: Sharing::default(),
            storage: FromStorage::default(),
            audit: Audit::default(),
        }
    }
}

impl GangOptions {
    /// The request that moves one VM; of a gang, its [`Sharing::together`] is to be set.
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
            accept_lost_writes: self.accept_lost_writes,
            accept_missing_taps: self.accept_missing_taps,
            sharing: self.sharing.clone(),
            storage: self.storage.clone(),
            audit: self.audit,
        }
    }
}

/// `POST /v1/gangs`: VMs by name, or all VMs of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GangRequest {
    /// VMs by name.
    #[serde(default)]
    pub moves: Vec<RequestedMove>,
    /// All VMs of a host, placed by their content and by free memory.
    #[serde(default)]
    pub evacuate: Option<Evacuation>,
    /// How they are moved.
    #[serde(default)]
    pub options: GangOptions,
    /// How many VMs leave one host, and how many arrive at one, at a time.
    #[serde(default = "default_parallel")]
    pub parallel: u16,
    /// Whether the first failure cancels the VMs that have not moved yet.
    #[serde(default)]
    pub atomic: bool,
    /// Only return the plan.
    #[serde(default)]
    pub dry_run: bool,
}

fn default_parallel() -> u16 {
    PARALLEL_DEFAULT
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
    /// Of that, what it uses: the bytes expected to cross the network, before compression.
    pub used_bytes: u64,
    /// Of that, what is expected not to be sent; none if that is not known.
    #[serde(default)]
    pub shared_bytes: Option<u64>,
    /// Why it need not be sent.
    #[serde(default)]
    pub shared: Option<SharedParts>,
    /// After a dry run, the limit with which its migration starts; none if the gang has none, or
    /// others start before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bits_per_s: Option<BitRate>,
}

/// The part of a VM that is expected not to be sent: an estimate from samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedParts {
    /// Content that VMs at the destination have.
    pub held_bytes: u64,
    /// Of the rest, content that this VM has more than once.
    pub within_bytes: u64,
    /// Of the rest, content that VMs before it in the gang's plan provide.
    pub common_bytes: u64,
}

impl SharedParts {
    /// The sum of all parts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held_bytes.saturating_add(self.within_bytes).saturating_add(self.common_bytes)
    }
}

/// A host's memory, before and after the gang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRoom {
    /// The host.
    pub host: String,
    /// Memory available for arriving VMs.
    pub free_bytes: u64,
    /// Of that, what is left once all have arrived.
    pub left_bytes: u64,
}

/// The plan of a gang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GangPlan {
    /// Each VM, the largest first.
    pub moves: Vec<PlannedMove>,
    /// The hosts that VMs go to.
    pub rooms: Vec<HostRoom>,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// What `POST /v1/gangs` and `POST /v1/gangs/ID/resume` answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GangStarted {
    /// The gang's id, for watching and cancelling it; none after a dry run.
    pub id: Option<String>,
    /// Its plan.
    pub plan: GangPlan,
}

/// The state of one VM of a gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveState {
    /// Its move has not started.
    Waiting,
    /// It moves.
    Moving,
    /// It is at its destination.
    Done,
    /// Its move failed; `reason` has the reason.
    Failed,
    /// Its move was taken back, or never started, because the gang was cancelled or another
    /// VM failed.
    Cancelled,
}

impl MoveState {
    /// Whether this state is final.
    #[must_use]
    pub fn has_ended(self) -> bool {
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
    /// Its state.
    pub state: MoveState,
    /// Its migration, at its source host.
    pub migration: Option<String>,
    /// Why it failed or was cancelled.
    pub reason: Option<String>,
    /// Whether it is in doubt: it may run at either host.
    #[serde(default)]
    pub in_doubt: bool,
    /// The progress of its migration, while it moves.
    pub progress: Option<Progress>,
}

/// All VMs of a gang together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GangTotals {
    /// VMs whose move has not started.
    pub waiting: usize,
    /// VMs that move.
    pub moving: usize,
    /// VMs at their destination.
    pub done: usize,
    /// VMs that failed.
    pub failed: usize,
    /// VMs that were taken back or never started.
    pub cancelled: usize,
    /// Memory that all VMs use, by the plan.
    pub used_bytes: u64,
    /// Of that, all of the VMs that have arrived, and the part of the others that has.
    pub moved_bytes: u64,
    /// Bytes per second on all lanes of all VMs.
    pub wire_bytes_per_s: f64,
}

/// How a gang ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GangOutcome {
    /// All VMs are at their destinations.
    Done,
    /// Some are not; each with its reason.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// Its agent ended before the gang did: the gang can be resumed.
    Interrupted,
}

/// One line of `GET /v1/gangs/ID/progress` (NDJSON) and what `GET /v1/gangs/ID`
/// answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct GangProgress {
    /// The gang.
    pub id: String,
    /// Seconds since it was started, or resumed.
    pub elapsed_s: f64,
    /// Each VM.
    pub moves: Vec<MoveProgress>,
    /// The sums over all VMs.
    pub totals: GangTotals,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// Set once it ended.
    pub outcome: Option<GangOutcome>,
}

impl MoveProgress {
    /// The part of the VM that is at its destination, from 0 to 1.
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
        let theirs: MigrateRequest = serde_json::from_str(r#"{"vm":"v","to":"b"}"#).unwrap();
        assert_eq!(serde_json::to_value(ours).unwrap(), serde_json::to_value(theirs).unwrap());
    }
}
