//! Disks that another program serves, such as SPDK or `qemu-storage-daemon`.
//!
//! QEMU has no block node for them, so they are in none of its lists of images. At the
//! destination the program at the same socket may serve any other disk.

use super::{Challenge, Proof};
use crate::shape::{Device, Shape};

/// How the types of their devices start.
const KINDS: [&str; 3] = ["vhost-user-blk", "vhost-user-scsi", "vhost-scsi"];

/// A challenge for each device with such disks, which no host can meet.
pub(super) fn challenges(shape: &Shape) -> impl Iterator<Item = Challenge> {
    shape.devices.iter().filter(|device| is_served(device)).map(|device| Challenge {
        image: device.to_string(),
        proof: Proof::Impossible {
            reason: "another program serves it, and QEMU doesn't know its source".to_owned(),
        },
    })
}

fn is_served(device: &Device) -> bool {
    KINDS.iter().any(|kind| device.kind.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks;

    #[test]
    fn a_disk_that_another_program_serves_is_not_shown_to_be_the_same() {
        let device = |id: &str, kind: &str| Device {
            id: (!id.is_empty()).then(|| id.to_owned()),
            kind: kind.to_owned(),
        };
        let devices = vec![
            device("d0", "vhost-user-blk-pci"),
            device("", "vhost-user-scsi-pci-non-transitional"),
            device("s0", "vhost-scsi-ccw"),
            device("d1", "virtio-blk-pci"),
            device("s1", "virtio-scsi-pci"),
            device("fs0", "vhost-user-fs-pci"),
        ];
        let shape = Shape { devices, ..Shape::default() };
        let (made, _cleanup) = disks::challenges(&shape, "m1", &|| Ok(()));
        let refused = made.iter().map(|one| disks::verify(one, &[], None, &|| Ok(())).unwrap_err());
        let refused: Vec<String> = refused.map(|error| error.to_string()).collect();
        assert_eq!(refused.len(), 3, "{refused:?}");
        let expected = "the vhost-user-blk-pci device `d0` can't be proved to be the same at both \
                        hosts: another program serves it";
        assert!(refused[0].starts_with(expected), "{refused:?}");
    }
}
