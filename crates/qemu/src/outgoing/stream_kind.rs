//! Which of QEMU's streams to tap.

use super::Settings;
use crate::qmp::{Qmp, QmpError};
use crate::shape::Device;

/// The kinds of QEMU's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// One socket, one thread of QEMU.
    Classic,
    /// The same, of a VM with a VFIO device. Only QEMU can tell the device's state from
    /// pages, so the stream is passed through whole, and QEMU is not held: see
    /// [`Hold::Unknown`](super::Hold::Unknown).
    Whole,
    /// This many channels next to the main one.
    Multifd(u8),
}

/// Devices that write sections of their own before RAM has ended, by how the names
/// of their types start. A classic stream with such a section can still be passed
/// through as a whole; a multifd stream can't. The section of a virtio-mem device is
/// known, and no obstacle.
const ITERATING: [(&str, &str); 3] = [
    ("vfio", "sends its state while RAM is still being sent"),
    ("x-vfio", "sends its state while RAM is still being sent"),
    ("vhost-vdpa", "may send its state while RAM is still being sent"),
];
/// Those of them that use `switchover-ack` themselves.
const ACKNOWLEDGING: [&str; 2] = ["vfio", "x-vfio"];

impl StreamKind {
    /// A stream by one socket, of a VM with these devices.
    #[must_use]
    pub fn classic(devices: &[Device]) -> Self {
        if acknowledges(devices) { Self::Whole } else { Self::Classic }
    }
}

/// Multifd with `channels` channels where QEMU and the VM's devices allow it,
/// else the classic stream and the reason.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn choose_stream(
    qmp: &Qmp,
    devices: &[Device],
    channels: u8,
) -> Result<(StreamKind, Option<String>), QmpError> {
    let settings = Settings::of(qmp)?;
    if !settings.has_capability("multifd") {
        let reason = "this QEMU has no multifd".to_owned();
        return Ok((StreamKind::classic(devices), Some(reason)));
    }
    Ok(match iterating(devices) {
        Some(reason) => (StreamKind::classic(devices), Some(reason)),
        None => (StreamKind::Multifd(channels), None),
    })
}

fn iterating(devices: &[Device]) -> Option<String> {
    devices.iter().find_map(|device| {
        let (_, why) = ITERATING.iter().find(|(start, _)| device.kind.starts_with(start))?;
        Some(format!("{device} {why}"))
    })
}

/// Whether QEMU's acknowledgements belong to one of these devices.
fn acknowledges(devices: &[Device]) -> bool {
    let mut kinds = devices.iter().map(|device| &device.kind);
    kinds.any(|kind| ACKNOWLEDGING.iter().any(|start| kind.starts_with(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: &str) -> [Device; 1] {
        [Device { id: Some("d0".to_owned()), kind: kind.to_owned() }]
    }

    #[test]
    fn devices_with_sections_of_their_own_make_it_classic() {
        assert_eq!(iterating(&one("virtio-net-pci")), None);
        assert_eq!(iterating(&one("virtio-blk-pci")), None);
        let reason = iterating(&one("vfio-pci")).unwrap();
        assert!(reason.starts_with("the vfio-pci device `d0` sends its state"), "{reason}");
        assert_eq!(iterating(&one("virtio-mem-pci")), None);
    }

    #[test]
    fn only_devices_that_acknowledge_make_it_whole() {
        for (kind, expected) in [
            ("vfio-pci", StreamKind::Whole),
            ("vfio-pci-nohotplug", StreamKind::Whole),
            ("vhost-vdpa-device-pci", StreamKind::Classic),
            ("virtio-net-pci", StreamKind::Classic),
        ] {
            assert_eq!(StreamKind::classic(&one(kind)), expected, "{kind}");
        }
        let [network, vfio] = [one("virtio-net-pci"), one("vfio-pci")];
        assert_eq!(StreamKind::classic(&[network, vfio].concat()), StreamKind::Whole);
        assert_eq!(StreamKind::classic(&[]), StreamKind::Classic);
    }
}
