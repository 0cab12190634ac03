//! A VM's state, in a few words.

use api::{HostVm, VmStatus, VmSummary};

use crate::Tone;

/// The state of a VM.
#[must_use]
pub fn status(vm: &VmSummary) -> &'static str {
    word(vm.status)
}

/// The state of a VM in its host's census.
#[must_use]
pub fn state(vm: &HostVm) -> (&'static str, Tone) {
    if vm.status == VmStatus::Running && vm.migration.is_some() {
        return ("moving", Tone::Calm);
    }
    let tone = match vm.status {
        VmStatus::Running => Tone::Good,
        VmStatus::Paused | VmStatus::Arriving => Tone::Calm,
        VmStatus::InDoubt | VmStatus::Unreadable | VmStatus::Dead => Tone::Bad,
    };
    (word(vm.status), tone)
}

fn word(status: VmStatus) -> &'static str {
    match status {
        VmStatus::Running => "running",
        VmStatus::Paused => "paused",
        VmStatus::Arriving => "arriving",
        VmStatus::InDoubt => "in doubt",
        VmStatus::Unreadable => "unreadable",
        VmStatus::Dead => "dead",
    }
}
