//! What a live VM consists of, as far as it matters for a migration.
//!
//! A destination QEMU is started from a command line, and the live VM may have
//! drifted from it: devices plugged, media changed, snapshots taken. So both
//! ends are queried over QMP and compared; a difference that QEMU would find
//! only when it loads the device state, or never, is found before the start.
//!
//! Devices that QEMU creates by itself (`/machine/unattached`) follow from the
//! machine type and differ in order between versions: they are left out.

mod differences;
mod features;
mod query;

use std::time::Duration;

use crate::qmp::{Qmp, QmpError};

pub use facts::shape::{Device, Drive, FeatureWord, Image, Medium, Memory, Node, Shape};
pub(crate) use query::drive_name;

/// What the live VM consists of.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn of(qmp: &Qmp) -> Result<Shape, QmpError> {
    query::shape(qmp)
}

/// A live VM's machine type alone, with its version.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn machine_of(qmp: &Qmp) -> Result<String, QmpError> {
    query::machine(qmp)
}

/// Whether the guest may report free memory through a balloon: QEMU leaves that out of a
/// migration. Only QEMU knows: a balloon may come from a file, or be plugged in later.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn has_free_page_hint(qmp: &Qmp) -> Result<bool, QmpError> {
    query::has_free_page_hint(qmp)
}

/// Whether the VM has a virtio network card.
///
/// # Errors
/// If QEMU doesn't answer.
pub(crate) fn has_virtio_net(qmp: &Qmp) -> Result<bool, QmpError> {
    query::has_virtio_net(qmp)
}

/// The paths and kinds of plugged devices whose kind starts so.
///
/// # Errors
/// If QEMU doesn't answer.
pub(crate) fn plugged(qmp: &Qmp, kind: &str) -> Result<Vec<(String, String)>, QmpError> {
    query::plugged(qmp, kind)
}

/// How the VM that waits at the destination differs from the one `here`, in
/// sentences for the operator; empty if it may be loaded. File names of the VM
/// `here` are compared after `overrides` are applied.
#[must_use]
pub fn differences(here: &Shape, there: &Shape, overrides: &[(String, String)]) -> Vec<String> {
    differences::differences(here, there, overrides)
}

/// The live VM's drives, with the medium in each.
///
/// # Errors
/// If QEMU doesn't answer within `timeout`.
pub fn drives_of(qmp: &Qmp, timeout: Duration) -> Result<Vec<Drive>, QmpError> {
    query::drives(qmp, timeout)
}

/// The names of the block nodes under each of the live VM's drives. While these are the same, no
/// drive holds other files.
///
/// # Errors
/// If QEMU doesn't answer within `timeout`.
pub fn node_names(qmp: &Qmp, timeout: Duration) -> Result<Vec<(String, Vec<String>)>, QmpError> {
    query::node_names(qmp, timeout)
}

/// How one of the drives `before` holds other files `now`, in a sentence for the operator. One
/// that was emptied doesn't count: its former file has all that was written.
#[must_use]
pub fn changed_files(before: &[Drive], now: &[Drive]) -> Option<String> {
    before.iter().find_map(|drive| differences::changed_files(drive, now))
}

/// The features that the vCPUs `here` offer the guest and those at the destination
/// don't, by name. Empty if the models differ, which is a difference by itself.
#[must_use]
pub fn missing_features(here: &Shape, there: &Shape) -> Vec<String> {
    if here.cpu != there.cpu {
        return Vec::new();
    }
    features::missing(&here.cpu_features, &there.cpu_features)
}
