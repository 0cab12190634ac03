//! Which of QEMU's streams to tap.

use super::Settings;
use crate::qmp::{Qmp, QmpError};
use crate::shape::Device;

/// The kinds of QEMU's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// One socket, one thread of QEMU.
    Classic,
    /// This many channels beside the main one.
    Multifd(u8),
}

/// Devices that write sections of their own before RAM has ended, by how the names
/// of their types begin. A classic stream with such a section can still be passed
/// through as a whole; a multifd stream can't. The section of a virtio-mem device is
/// known, and no obstacle.
const ITERATING: [(&str, &str); 3] = [
    ("vfio", "sends its state while RAM is still being sent"),
    ("x-vfio", "sends its state while RAM is still being sent"),
    ("vhost-vdpa", "may send its state while RAM is still being sent"),
];

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
        return Ok((StreamKind::Classic, Some("this QEMU has no multifd".to_owned())));
    }
    Ok(match iterating(devices) {
        Some(reason) => (StreamKind::Classic, Some(reason)),
        None => (StreamKind::Multifd(channels), None),
    })
}

fn iterating(devices: &[Device]) -> Option<String> {
    devices.iter().find_map(|device| {
        let (_, why) = ITERATING.iter().find(|(start, _)| device.kind.starts_with(start))?;
        Some(format!("{device} {why}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_with_sections_of_their_own_make_it_classic() {
        let one = |kind: &str| [Device { id: Some("d0".to_owned()), kind: kind.to_owned() }];
        assert_eq!(iterating(&one("virtio-net-pci")), None);
        assert_eq!(iterating(&one("virtio-blk-pci")), None);
        let reason = iterating(&one("vfio-pci")).unwrap();
        assert!(reason.starts_with("the vfio-pci device `d0` sends its state"), "{reason}");
        assert_eq!(iterating(&one("virtio-mem-pci")), None);
    }
}
