//! One migration: its request, phases, progress and outcome.

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
    /// Chosen by what the lanes wait for.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always lz4, except for content that doesn't shrink.
    Lz4,
    /// Always zstd, except for content that doesn't shrink.
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
    /// The number of lanes; by default one per core up to 8, and at least one per NIC.
    #[serde(default)]
    pub lanes: Option<u16>,
    /// The downtime goal.
    #[serde(default = "default_downtime_ms")]
    #[schema(minimum = 1, maximum = 60_000)]
    pub downtime_ms: u64,
    /// The blackout bound: how long the VM may stand still, in seconds, before the move is taken
    /// back.
    ///
    /// By default ten times the downtime goal, and at least 3 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub blackout_max_s: Option<u64>,
    /// How far the VM may be throttled.
    #[serde(default)]
    pub slowing: Slowing,
    /// How it shares content with other VMs.
    #[serde(default)]
    pub sharing: Sharing,
    /// Which pages are read from its disks.
    #[serde(default)]
    pub storage: FromStorage,
    /// How bodies are encoded.
    #[serde(default)]
    pub compress: Compress,
    /// Which stream to tap.
    #[serde(default)]
    pub tap: TapChoice,
    /// The operator's confirmation that both hosts see the same storage.
    #[serde(default)]
    pub shared_disks: bool,
    /// `OLD=NEW`: replacements in the command line of the destination's QEMU.
    #[serde(default)]
    pub set: Vec<String>,
    /// Disks to move with the VM: `all`, or names separated by commas; none by default.
    #[serde(default)]
    pub disks: Option<String>,
    /// Create images that do not exist at the destination.
    #[serde(default)]
    pub create_disks: bool,
    /// Overwrite images at the destination that hold data.
    #[serde(default)]
    pub overwrite_disks: bool,
    /// How long it may take until the source releases the VM.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 86_400)]
    pub timeout_s: Option<u64>,
    /// The resources that it may use.
    #[serde(default)]
    pub bounds: Bounds,
    /// QMP socket, at the destination, of a QEMU that waits with `-incoming defer -S` and that
    /// the agent did not start.
    #[serde(default)]
    pub incoming_qmp: Option<String>,
    /// Permit a destination with less free memory than the VM's RAM.
    #[serde(default)]
    pub overcommit_memory: bool,
    /// Permit a VM whose QEMU loses what its guest writes meanwhile: one older than 9.0, under TCG.
    // Agents of release 0.1.0 don't know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_lost_writes: bool,
    /// Permit a destination where a tap of the VM's network cards is missing, or down.
    // As above.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_missing_taps: bool,
    /// What is compared before the source releases the VM.
    #[serde(default)]
    pub audit: Audit,
}

/// What `POST /v1/migrations` answers.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MigrationStarted {
    /// The migration's id, for watching and cancelling it.
    pub id: String,
}

/// 300 ms: QEMU's own default for its downtime-limit.
pub(crate) fn default_downtime_ms() -> u64 {
    300
}

/// The share of CPU time of a VM that is not throttled.
pub(crate) fn all() -> f64 {
    1.0
}

/// The phase of a migration.
///
/// Phases follow in this order; a failure may end any of them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Both agents check, the destination starts QEMU, lanes connect.
    #[default]
    Prepare,
    /// QEMU's first pass over all of RAM.
    FirstPass,
    /// Further passes over pages that were dirtied meanwhile.
    LaterPass,
    /// The VM is stopped; the last pages and the device state are sent.
    Stopped,
    /// The destination has loaded everything and is paused.
    Loaded,
    /// The source gave the VM up. The point of no return.
    Committed,
    /// The VM runs at the destination, or is paused there as it was at the source.
    Running,
}

/// What limits the speed of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Nothing measured yet.
    #[default]
    Unknown,
    /// Lanes wait for their sockets.
    Network,
    /// Lanes keep to the operator's `--limit`.
    Bound,
    /// Lanes are busy encoding, or get no CPU; or the destination takes data more slowly than the
    /// network carries it.
    Cpu,
    /// Lanes wait for QEMU to hand pages over.
    Qemu,
    /// The guest dirties pages as fast as they are delivered.
    Guest,
    /// QEMU is held until the backlog fits the downtime goal.
    Hold,
    /// The destination's disks write blocks more slowly than they arrive, or pages are read from
    /// them.
    Disk,
}

/// How a migration ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "reason")]
pub enum Outcome {
    /// The VM runs at the destination.
    Done,
    /// The VM did not arrive, or that is not known; see the text.
    Failed(String),
    /// The operator cancelled; the VM continues at the source.
    #[default]
    Cancelled,
}

/// One line of `GET /v1/migrations/ID/progress` (NDJSON) and what
/// `GET /v1/migrations/ID` answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// The migration.
    pub id: String,
    /// The VM.
    pub vm: String,
    /// The source host.
    pub from: String,
    /// The destination host.
    pub to: String,
    /// Its phase.
    pub phase: Phase,
    /// Seconds since the command.
    pub elapsed_s: f64,
    /// Guest RAM that counts as 100 %.
    pub ram_bytes: u64,
    /// The part of it that the destination has in its newest known version.
    pub percent: f64,
    /// Guest bytes per second placed at the destination.
    pub delivered_bytes_per_s: f64,
    /// Bytes per second on the lanes.
    pub wire_bytes_per_s: f64,
    /// Guest bytes per second that the guest dirties, as QEMU estimates; 0 also while it is not
    /// known, as in the first pass.
    pub dirty_bytes_per_s: f64,
    /// The share of its CPU time that the VM keeps: 1 unless it is throttled.
    #[serde(default = "all")]
    pub share: f64,
    /// QEMU's passes so far, including the present one.
    pub pass: u32,
    /// Guest bytes not yet placed: those still in QEMU and those in flight.
    pub left_bytes: u64,
    /// Size of the disks that move, plus what was written to them again.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Of that, what is not yet mirrored.
    #[serde(default)]
    pub disk_left_bytes: u64,
    /// Seconds to the end, if they can be estimated.
    pub time_left_s: Option<f64>,
    /// What limits it now.
    pub limit: Limit,
    /// Whether `xl` sends it, in QEMU's place: it is a domain of Xen.
    // Agents of release 0.1.0 send none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_xl: bool,
    /// What it waits for in its first phase, if it has sent the destination a request.
    #[serde(default)]
    pub waits_for: Option<String>,
    /// Features that are not used, and why.
    pub notes: Vec<String>,
    /// Set once it ended.
    pub outcome: Option<Outcome>,
    /// Whether it ended with the VM in doubt: it may run at either host.
    #[serde(default)]
    pub in_doubt: bool,
}

impl Progress {
    /// The progress of a migration that has not started, with its id, VM and hosts.
    #[must_use]
    pub fn new((id, vm): (&str, &str), (from, to): (&str, &str), ram_bytes: u64) -> Self {
        Self {
            id: id.to_owned(),
            vm: vm.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            ram_bytes,
            share: 1.0,
            left_bytes: ram_bytes,
            ..Self::default()
        }
    }

    /// Guest bytes per second that the guest dirties. None if it is not known: QEMU counts for a
    /// second, and not in its first pass.
    #[must_use]
    pub fn dirties(&self) -> Option<f64> {
        Some(self.dirty_bytes_per_s).filter(|rate| *rate > 0.0)
    }
}
