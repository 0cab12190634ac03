//! What decisions about throttling are made from.

use std::time::Duration;

use super::stall::OnStall;

/// What the operator set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The downtime goal.
    pub goal: Duration,
    /// The part of it that is needed even without pages.
    pub fixed: Duration,
    /// The smallest share, above 0.
    pub floor: f64,
    /// The target of throttling.
    pub ratio: Ratio,
    /// When the VM should have arrived, counted from the migration's beginning.
    pub deadline: Option<Duration>,
    /// What to do when the floor isn't enough.
    pub on_stall: OnStall,
}

/// The target for a VM that has to be throttled: a ratio of its dirty rate to
/// the delivered rate (the paper's C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ratio {
    /// From the model, for the VM and the goal.
    Auto,
    /// Always this.
    Constant(f64),
    /// The VM is never throttled, and its migration never given up.
    Off,
}

/// The input of a decision: the migration as it is at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThrottleInput {
    /// Time since the migration's beginning.
    pub at: Duration,
    /// The VM's RAM.
    pub ram_bytes: u64,
    /// Bytes that are dirty, as far as QEMU knows, or in flight.
    pub left_bytes: u64,
    /// Guest bytes delivered per second while there is something to deliver.
    pub delivered_bytes_per_s: Option<f64>,
    /// The guest's dirty rate as QEMU reports it, over the last second or pass.
    pub dirty_bytes_per_s: Option<f64>,
    /// The share of CPU time that the guest had while that rate was measured, if rate and remainder
    /// are counted from passes ([`crate::passes`]). Then `left_bytes` is derived from the rate, and
    /// its changes say nothing new.
    pub counted_at_share: Option<f64>,
    /// Number of QEMU's current pass.
    pub pass: u32,
    /// Whether only the guest's writes delay the switchover: the first pass is over, and disks are
    /// copied.
    pub first_pass_over: bool,
    /// CPU seconds per second that the vCPUs to be throttled used since the
    /// last sample.
    pub used_cpus: f64,
    /// Whether lanes may be given more of the network, at the expense of other traffic.
    pub wider: bool,
}
