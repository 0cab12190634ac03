//! The progress of a migration, in words.

use api::{Limit, Phase, Progress};

use crate::phase_name;

/// The phase, as shown to a watcher.
#[must_use]
pub fn phase(progress: &Progress) -> String {
    match progress.phase {
        Phase::LaterPass => format!("pass {}", progress.pass),
        phase => phase_name(phase).to_owned(),
    }
}

/// What limits its speed; none while that is not known.
#[must_use]
pub fn limit(progress: &Progress) -> Option<&'static str> {
    match progress.limit {
        Limit::Unknown => None,
        Limit::Network => Some("limited by the network"),
        Limit::Bound => Some("limited by --limit"),
        Limit::Cpu => Some("limited by the CPU"),
        Limit::Qemu if progress.by_xl => Some("limited by xl"),
        Limit::Qemu => Some("limited by QEMU"),
        Limit::Guest => Some("limited by the guest's writes"),
        Limit::Hold => Some("held until the rest fits the goal"),
        Limit::Disk => Some("limited by the destination's storage"),
    }
}
