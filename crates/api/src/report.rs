//! The report of a migration: saved as JSON, shown as text or HTML.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Audited;
use crate::bounds::{Bounds, BoundsChanged};
use crate::migration::{Outcome, Phase, Progress, all};

/// When a phase started.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
pub struct PhaseTime {
    /// The phase.
    pub phase: Phase,
    /// When it started, in seconds since the command.
    pub start_s: f64,
}

/// The state of a migration at one instant.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Seconds since the command.
    pub at_s: f64,
    /// Guest bytes per second placed at the destination.
    pub delivered_bytes_per_s: f64,
    /// Bytes per second on the lanes.
    pub wire_bytes_per_s: f64,
    /// Guest bytes per second dirtied; 0 also while it is not known, as in the first pass.
    pub dirty_bytes_per_s: f64,
    /// The share of its CPU time that the VM kept.
    #[serde(default = "all")]
    pub share: f64,
    /// Guest bytes not yet placed.
    pub left_bytes: u64,
    /// Bytes in buffers between tap and placer, at the source.
    pub pool_bytes: u64,
    /// Bytes per second of each lane.
    pub lanes_bytes_per_s: Vec<f64>,
}

/// One lane over the whole migration.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct LaneReport {
    /// Local and remote address.
    pub name: String,
    /// Bytes written to it.
    pub wire_bytes: u64,
    /// Batches that were acknowledged on it.
    pub batches: u64,
    /// How often its connection was lost, or could not be opened, and its batches went to
    /// other lanes.
    pub deaths: u32,
}

/// One disk that moved.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Its size, as the guest sees it.
    pub bytes: u64,
    /// Bytes that were sent as data.
    pub data_bytes: u64,
    /// Bytes that were sent as zero ranges.
    pub zero_bytes: u64,
    /// From when on the guest's writes were throttled or waited for their copy, if they did.
    pub changed_s: Option<f64>,
}

/// How a VM was throttled so that its migration converged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Throttled {
    /// What throttled it.
    pub by: String,
    /// From when on, in seconds since the command.
    pub from_s: f64,
    /// Until when.
    pub to_s: f64,
    /// The smallest share of its CPU time that it had.
    pub lowest_share: f64,
    /// The work that it lost meanwhile, as seconds of its undisturbed work.
    pub lost_s: f64,
    /// The most vCPUs that were throttled at a time.
    pub vcpus: usize,
}

/// What a migration took of the network from other traffic, so that its VM need not be throttled or
/// arrives in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FromOthers {
    /// From when on, in seconds since the command.
    pub from_s: f64,
    /// Until when.
    pub to_s: f64,
    /// What was sent meanwhile beyond what others left.
    pub bytes: u64,
}

/// Everything recorded of one migration.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Report {
    /// The migration.
    pub id: String,
    /// The VM.
    pub vm: String,
    /// The source host.
    pub from: String,
    /// The destination host.
    pub to: String,
    /// When the command arrived, in seconds since 1970.
    pub started_unix_s: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Whether it ended with the VM in doubt: it may run at either host.
    #[serde(default)]
    pub in_doubt: bool,
    /// When it was settled which host has the VM, in seconds since 1970, if the migration had
    /// ended before, or the agent with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled_unix_s: Option<u64>,
    /// QEMU at the source and at the destination.
    pub qemu: [String; 2],
    /// `multifd` or `classic`, or `whole` where the stream could not be split.
    pub tap: String,
    /// `mapped` or `inline`.
    pub placement: String,
    /// From the command to the end.
    pub total_s: f64,
    /// Of that, until the destination's QEMU was ready.
    pub prepare_s: f64,
    /// The downtime goal.
    pub downtime_goal_ms: u64,
    /// From the source's STOP to the destination's RESUME; none if the VM was
    /// paused or never left.
    pub downtime_ms: Option<f64>,
    /// The downtime that was predicted when the agent let QEMU finish.
    pub predicted_downtime_ms: Option<f64>,
    /// How the VM was throttled, if it was.
    #[serde(default)]
    pub slowed: Option<Throttled>,
    /// What it took from other traffic so that the VM need not be throttled, if it did.
    #[serde(default)]
    pub from_others: Option<FromOthers>,
    /// Guest RAM.
    pub ram_bytes: u64,
    /// QEMU's passes.
    pub passes: u32,
    /// Page bodies that QEMU handed over, in bytes.
    pub body_bytes: u64,
    /// Zero and other fill pages that QEMU handed over, in bytes.
    pub fill_bytes: u64,
    /// RAM that QEMU left out of its first pass, because the guest had reported it as free.
    #[serde(default)]
    pub free_bytes: u64,
    /// Of the bodies, those that were not sent because the guest changed them again while they
    /// waited.
    #[serde(default)]
    pub dropped_bytes: u64,
    /// Of the bodies, those sent as deltas, because the destination had their previous
    /// version.
    #[serde(default)]
    pub delta_bytes: u64,
    /// Of the bodies, those that were not sent because the destination had their content.
    #[serde(default)]
    pub named_bytes: u64,
    /// Of the bodies, those that were not hashed to be sent by name, because they were named
    /// before the migration and had not changed.
    #[serde(default)]
    pub named_before_bytes: u64,
    /// Of `named_bytes`, those provided by other hosts of the destination's rack.
    #[serde(default)]
    pub peer_bytes: u64,
    /// Of the bodies, those that the source sent although another provider was expected: the
    /// destination waited for it in vain.
    #[serde(default)]
    pub again_bytes: u64,
    /// Of `named_bytes`, those read from the VM's disks at the destination.
    #[serde(default)]
    pub stored_bytes: u64,
    /// Bytes that were read from storage for that.
    #[serde(default)]
    pub storage_read_bytes: u64,
    /// Of the bodies, those that arrived after the VM had stopped: memory's part of the
    /// downtime.
    #[serde(default)]
    pub stopped_bytes: u64,
    /// Bytes of the non-RAM stream.
    pub residue_bytes: u64,
    /// Bytes written to all lanes and the control connection.
    pub wire_bytes: u64,
    /// CPU seconds of the source agent's data threads.
    pub cpu_source_s: f64,
    /// CPU seconds of the destination agent's data threads.
    pub cpu_destination_s: f64,
    /// Most bytes ever held in buffers, source and destination.
    pub pool_high_water_bytes: [u64; 2],
    /// The resources that it could use, at the end.
    #[serde(default)]
    pub bounds: Bounds,
    /// The changes of that while it ran.
    #[serde(default)]
    pub bounds_changes: Vec<BoundsChanged>,
    /// What its audit found.
    #[serde(default)]
    pub audit: Audited,
    /// Features that were not used, and why.
    pub notes: Vec<String>,
    /// The phases that it went through.
    pub phases: Vec<PhaseTime>,
    /// Each disk that moved.
    #[serde(default)]
    pub disks: Vec<DiskReport>,
    /// Each lane.
    pub lanes: Vec<LaneReport>,
    /// Samples over time, about 20 a second, thinned out for long migrations.
    pub samples: Vec<Sample>,
}

impl Report {
    /// A report from a migration's progress alone.
    pub fn empty(progress: &Progress, started_unix_s: u64, outcome: Outcome) -> Self {
        Self {
            id: progress.id.clone(),
            vm: progress.vm.clone(),
            from: progress.from.clone(),
            to: progress.to.clone(),
            started_unix_s,
            outcome,
            total_s: progress.elapsed_s,
            ram_bytes: progress.ram_bytes,
            passes: progress.pass,
            notes: progress.notes.clone(),
            ..Self::default()
        }
    }
}
