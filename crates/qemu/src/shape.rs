//! What a live VM is made of, as far as a migration cares.
//!
//! A destination QEMU is started from a command line, and the live VM may have
//! drifted from it: devices plugged, media changed, snapshots taken. So both
//! ends are asked over QMP and compared; a difference that QEMU would find
//! only when it loads the device state, or never, is found before the start.
//!
//! What QEMU makes by itself (`/machine/unattached`) follows from the machine
//! type and differs in order between versions: it is left out.

mod differences;
mod features;
mod query;

use crate::qmp::{Qmp, QmpError};

pub use facts::shape::{Device, Drive, FeatureWord, Image, Medium, Memory, Node, Shape};
pub(crate) use query::drive_name;

/// What the live VM is made of.
///
/// # Errors
/// If QEMU doesn't say.
pub fn of(qmp: &Qmp) -> Result<Shape, QmpError> {
    query::shape(qmp)
}

/// A live VM's machine type alone, with its version.
///
/// # Errors
/// If QEMU doesn't say.
pub fn machine_of(qmp: &Qmp) -> Result<String, QmpError> {
    query::machine(qmp)
}

/// How the VM that waits at the destination differs from the one `here`, in
/// sentences for the operator; none if it may be loaded. File names of the one
/// here are compared as `overrides` make them.
#[must_use]
pub fn differences(here: &Shape, there: &Shape, overrides: &[(String, String)]) -> Vec<String> {
    differences::differences(here, there, overrides)
}

/// What the vCPUs of the one `here` offer the guest and those of the VM that
/// waits at the destination don't, by name. Of another model, which is a
/// difference by itself, nothing is said.
#[must_use]
pub fn missing_features(here: &Shape, there: &Shape) -> Vec<String> {
    if here.cpu != there.cpu {
        return Vec::new();
    }
    features::missing(&here.cpu_features, &there.cpu_features)
}
