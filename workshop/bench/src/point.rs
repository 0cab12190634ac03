//! What was measured at one point of a sweep.

use serde::Serialize;

use super::result::Outcome;

/// Outcome of a point.
#[derive(Clone, Debug, Serialize)]
pub struct PointOutcome {
    /// Rate of the link in each direction.
    pub link_mbit_per_s: u32,
    /// Rate at which the guest was to write, as a share of the link's.
    pub dirty_of_link: f64,
    /// All other results.
    #[serde(flatten)]
    pub outcome: Outcome,
}
