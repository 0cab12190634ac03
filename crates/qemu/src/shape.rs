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

pub use differences::differences;
pub use facts::shape::{Device, Drive, FeatureWord, Image, Medium, Memory, Node, Shape};
pub(crate) use query::{backing, chain, drive_name, has_virtio_net, plugged};
pub use query::{drives_of, has_free_page_hint, machine_of, node_names, of};

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
