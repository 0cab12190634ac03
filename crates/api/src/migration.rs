//! One migration: asked for, watched, ended.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Audit;
use crate::bounds::Bounds;
use crate::sharing::Sharing;
use crate::slowing::Slowing;
use crate::storage::FromStorage;

/// How page bodies are encoded on the lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compress {
    /// By who waits for whom.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always lz4, but for content that doesn't shrink.
    Lz4,
    /// Always zstd, but for content that doesn't shrink.
    Zstd,
}

/// Which of QEMU's streams is tapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TapChoice {
    /// Multifd where QEMU and the VM's devices allow it.
    #[default]
    Auto,
    /// Multifd, or fail.
    Multifd,
    /// The classic stream.
    Classic,
}

/// `droveway migrate`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The VM to move.
    pub vm: String,
    /// The host to move it to, as named in the peers file.
    pub to: String,
    /// Connections to carry it; by default one per core up to 8, and at least
    /// one per NIC.
    #[serde(default)]
    pub lanes: Option<u16>,
    /// The blackout that the operator accepts.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u64,
    /// How long it may stand still before the move is taken back: in seconds; by
    /// default ten times as long, and 3 s at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blackout_max_s: Option<u64>,
    /// How far the VM may be slowed for it.
    #[serde(default)]
    pub slowing: Slowing,
    /// What content it has in common with others.
    #[serde(default)]
    pub sharing: Sharing,
    /// What of its memory its disks have.
    #[serde(default)]
    pub storage: FromStorage,
    /// How bodies are encoded.
    #[serde(default)]
    pub compress: Compress,
    /// Which stream to tap.
    #[serde(default)]
    pub tap: TapChoice,
    /// The operator's word that both hosts see the same storage.
    #[serde(default)]
    pub shared_disks: bool,
    /// `OLD=NEW`: texts of the command line that differ at the destination.
    #[serde(default)]
    pub set: Vec<String>,
    /// Disks to move with the VM: `all`, or names with commas between; none of
    /// them by default.
    #[serde(default)]
    pub disks: Option<String>,
    /// Make images at the destination that aren't there.
    #[serde(default)]
    pub create_disks: bool,
    /// Overwrite images at the destination that hold data.
    #[serde(default)]
    pub overwrite_disks: bool,
    /// How long it may take until the VM is given up.
    #[serde(default)]
    pub timeout_s: Option<u64>,
    /// What it may use.
    #[serde(default)]
    pub bounds: Bounds,
    /// QMP socket, at the destination, of a QEMU that waits with
    /// `-incoming defer -S` and was started by somebody else.
    #[serde(default)]
    pub incoming_qmp: Option<String>,
    /// Let it go to a host that has less memory free than its RAM.
    #[serde(default)]
    pub overcommit_memory: bool,
    /// What is compared before the VM is given up.
    #[serde(default)]
    pub audit: Audit,
}

/// What `POST /v1/migrations` answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MigrationStarted {
    /// The migration, for watching and cancelling it.
    pub id: String,
}

/// Whether what is allowed for a VM's blackout goes together.
///
/// # Errors
/// If it does not, with the reason.
pub fn check_blackout(downtime_ms: u64, blackout_max_s: Option<u64>) -> Result<(), String> {
    if downtime_ms == 0 {
        return Err("a downtime of 0 ms can't be kept: allow 1 at least".to_owned());
    }
    match blackout_max_s {
        Some(seconds) if seconds.saturating_mul(1000) < downtime_ms => Err(format!(
            "a move that is taken back after {seconds} s can't have a downtime of {downtime_ms} \
             ms: raise --blackout-max, or lower --downtime-ms"
        )),
        _ => Ok(()),
    }
}

/// 300 ms: QEMU's own default for its downtime-limit.
pub(crate) fn default_downtime_ms() -> u64 {
    300
}

/// A VM that is not slowed.
pub(crate) fn all() -> f64 {
    1.0
}

/// Where a migration is. In this order; a failure may end it at any point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Both ends check, the destination starts QEMU, lanes connect.
    Prepare,
    /// QEMU's first sweep over all of RAM.
    FirstPass,
    /// Further sweeps over what was dirtied meanwhile.
    LaterPass,
    /// The VM is stopped; the last pages and the device state travel.
    Stopped,
    /// The destination has loaded everything and is paused.
    Loaded,
    /// The source gave the VM up. The point of no return.
    Committed,
    /// The VM runs at the destination (or is paused there, as it was here).
    Running,
}

/// What keeps a migration from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Nothing measured yet.
    Unknown,
    /// Lanes wait for their sockets.
    Network,
    /// Lanes keep to the operator's `--limit`.
    Bound,
    /// Lanes are busy encoding, or have no CPU.
    Cpu,
    /// Lanes wait for QEMU to hand pages over.
    Qemu,
    /// The guest dirties pages as fast as they are delivered.
    Guest,
    /// QEMU is held until the backlog fits the downtime goal.
    Hold,
    /// The destination's disks take blocks more slowly than they come.
    Disk,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "reason")]
pub enum Outcome {
    /// The VM runs at the destination.
    Done,
    /// It goes on at the source, and why.
    Failed(String),
    /// The operator cancelled; it goes on at the source.
    Cancelled,
}

/// One line of `GET /v1/migrations/ID/progress` (NDJSON) and what
/// `GET /v1/migrations/ID` answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// The migration.
    pub id: String,
    /// Which VM.
    pub vm: String,
    /// From which host.
    pub from: String,
    /// To which host.
    pub to: String,
    /// Where it is.
    pub phase: Phase,
    /// Seconds since the command.
    pub elapsed_s: f64,
    /// Guest RAM that counts as 100 %.
    pub ram_bytes: u64,
    /// Of it, how much the destination has in its newest known version.
    pub percent: f64,
    /// Guest bytes per second placed at the destination.
    pub delivered_bytes_per_s: f64,
    /// Bytes per second on the lanes.
    pub wire_bytes_per_s: f64,
    /// Guest bytes per second that the guest dirties, as QEMU estimates.
    pub dirty_bytes_per_s: f64,
    /// The share of its CPU time that the VM keeps: 1 unless it is slowed.
    #[serde(default = "all")]
    pub share: f64,
    /// QEMU's sweeps so far, the present one counted.
    pub pass: u32,
    /// Guest bytes not yet placed, QEMU's and ours together.
    pub left_bytes: u64,
    /// Size of the disks that move, with what was written to them again.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Of it, what is not yet mirrored.
    #[serde(default)]
    pub disk_left_bytes: u64,
    /// Seconds to the end, where that can be said.
    pub time_left_s: Option<f64>,
    /// What limits it now.
    pub limit: Limit,
    /// Features that are not used, and why.
    pub notes: Vec<String>,
    /// Set once it ended.
    pub outcome: Option<Outcome>,
}

impl Progress {
    /// Of the migration of a VM, by its id and name, between these hosts, before anything
    /// was done.
    #[must_use]
    pub fn new((id, vm): (&str, &str), (from, to): (&str, &str), ram_bytes: u64) -> Self {
        Self {
            id: id.to_owned(),
            vm: vm.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            phase: Phase::Prepare,
            elapsed_s: 0.0,
            ram_bytes,
            percent: 0.0,
            delivered_bytes_per_s: 0.0,
            wire_bytes_per_s: 0.0,
            dirty_bytes_per_s: 0.0,
            share: 1.0,
            pass: 0,
            left_bytes: ram_bytes,
            disk_bytes: 0,
            disk_left_bytes: 0,
            time_left_s: None,
            limit: Limit::Unknown,
            notes: Vec::new(),
            outcome: None,
        }
    }
}
