//! Names of a migration's phases.

use api::Phase;

/// A phase's name, for text and HTML.
#[must_use]
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Prepare => "preparing",
        Phase::FirstPass => "first pass",
        Phase::LaterPass => "later passes",
        Phase::Stopped => "stopped",
        Phase::Loaded => "loaded",
        Phase::Committed => "committed",
        Phase::Running => "running",
    }
}
