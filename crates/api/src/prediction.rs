//! What a migration would take, before it is begun.

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
    /// The blackout that the operator accepts.
    pub downtime_ms: u64,
    /// How far the VM may be slowed.
    #[serde(default)]
    pub slowing: Slowing,
    /// What the migration can have of the network; by default all that its
    /// network cards carry.
    #[serde(default)]
    pub rate_bits_per_s: Option<BitRate>,
}

/// A migration that has not been.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Outlook {
    /// From the command to the VM running at the destination.
    pub total_s: f64,
    /// What is sent, uncompressed.
    pub bytes: u64,
    /// How long the VM is gone.
    pub downtime_ms: f64,
    /// Whether that is within the goal.
    pub met: bool,
}

/// What a migration would take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Prediction {
    /// The VM.
    pub vm: String,
    /// Where to.
    pub to: String,
    /// The downtime goal.
    pub downtime_goal_ms: u64,
    /// Memory that the VM has touched.
    pub used_bytes: u64,
    /// What it dirtied per second while it was watched.
    pub dirty_bytes_per_s: f64,
    /// What it writes to over and over, if that is less than could be told from
    /// all of its memory.
    pub working_set_bytes: Option<u64>,
    /// Of a page that it writes again, the share that changes, and is sent again; none if
    /// too few were seen to change.
    pub changed_share: Option<f64>,
    /// What can be delivered per second, uncompressed.
    pub delivered_bytes_per_s: f64,
    /// If it isn't slowed.
    pub free: Outlook,
    /// If it is, as far as it may be.
    pub slowed: Outlook,
    /// The share of its CPU time that it keeps then.
    pub share: f64,
    /// Its work that is lost then, as seconds of undisturbed work.
    pub lost_s: f64,
    /// If the deadline can't be met: what it takes at least.
    pub misses_deadline_s: Option<f64>,
    /// Memory that the guest doesn't use.
    #[serde(default)]
    pub free_memory: FreeMemory,
}

/// Memory that a guest doesn't use, as far as it makes a difference.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FreeMemory {
    /// Shared memory that was never used, and that QEMU reads nonetheless: it is
    /// allocated by that.
    pub unused_shared_bytes: u64,
    /// What that adds to both outlooks, by how fast this host allocates. Some of it is done
    /// ahead of QEMU, while the link is busy.
    pub reading_s: f64,
    /// The guest can tell QEMU what is free (free-page-hint), and that is not sent.
    pub hinted: bool,
    /// Whether the guest's kernel clears each page that it allocates, by its helper; then
    /// it writes to all that it calls free.
    pub guest_clears: Option<bool>,
}
