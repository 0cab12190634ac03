//! A prediction of what a migration would take.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bounds::BitRate;
use crate::slowing::Slowing;

/// `POST /v1/vms/NAME/predict`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictRequest {
    /// The host to move it to.
    pub to: String,
    /// The downtime goal.
    #[schema(minimum = 1, maximum = 60_000)]
    pub downtime_ms: u64,
    /// How far the VM may be throttled.
    #[serde(default)]
    pub slowing: Slowing,
    /// The bandwidth that the migration can use; by default all that its network cards carry.
    #[serde(default)]
    pub rate_bits_per_s: Option<BitRate>,
}

/// The predicted course of one migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Outlook {
    /// From the command to the VM running at the destination, with content compressed as far as a
    /// sample of it can be.
    pub total_s: f64,
    /// The same if nothing is compressed; none if the goal would be missed then.
    #[serde(default)]
    pub most_s: Option<f64>,
    /// Bytes to send, before compression.
    pub bytes: u64,
    /// The downtime.
    pub downtime_ms: f64,
    /// Whether the downtime is within the goal.
    pub met: bool,
}

/// What compression gains, by a sample of the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Compressed {
    /// The share of its size that is left of content, pages of zeros aside.
    pub share: f64,
    /// Guest bytes that can be delivered per second, as far as this host can compress them.
    pub delivered_bytes_per_s: f64,
}

/// What a migration would take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Prediction {
    /// The VM.
    pub vm: String,
    /// The destination host.
    pub to: String,
    /// The downtime goal.
    pub downtime_goal_ms: u64,
    /// Memory that the VM has touched.
    pub used_bytes: u64,
    /// Bytes that it dirtied per second while it was sampled.
    pub dirty_bytes_per_s: f64,
    /// The memory that it keeps writing to; none if the samples could not separate that from all
    /// of its memory.
    pub working_set_bytes: Option<u64>,
    /// The share of a rewritten page that changes and so is sent again; none if too few pages
    /// changed in the samples.
    pub changed_share: Option<f64>,
    /// Guest bytes that can be delivered per second if nothing is compressed.
    pub delivered_bytes_per_s: f64,
    /// The same with compression; none if next to nothing is gained, or no memory could be read.
    #[serde(default)]
    pub compressed: Option<Compressed>,
    /// Without throttling.
    pub free: Outlook,
    /// With as much throttling as is permitted.
    pub slowed: Outlook,
    /// The share of its CPU time that the VM keeps when throttled.
    pub share: f64,
    /// The work that throttling costs it, as seconds of undisturbed work.
    pub lost_s: f64,
    /// If the deadline can't be met: the least time that the move takes.
    pub misses_deadline_s: Option<f64>,
    /// If it has to be throttled: the least `delivered_bytes_per_s` with which it would not.
    #[serde(default)]
    pub needed_bytes_per_s: Option<f64>,
    /// Memory that the guest doesn't use.
    #[serde(default)]
    pub free_memory: FreeMemory,
    /// Why a move would be refused, as far as its QEMU shows; none if nothing is known.
    #[serde(default)]
    pub refused: Option<String>,
}

/// Memory that a guest doesn't use, as far as it affects the migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FreeMemory {
    /// Shared memory that was never used; QEMU reads it all the same, which allocates it.
    pub unused_shared_bytes: u64,
    /// What that adds to both outlooks, by the speed at which this host allocates.
    ///
    /// Some of it is allocated ahead of QEMU, while the link is busy.
    pub reading_s: f64,
    /// The guest can report to QEMU which memory is free (free-page-hint); that is not sent.
    pub hinted: bool,
    /// Whether the guest's kernel clears each page that it allocates, as the helper reports: it
    /// then writes to all memory that it reports as free.
    pub guest_clears: Option<bool>,
}
