//! Disks that the guest sends its own SCSI commands to, past QEMU's block layer.
//!
//! QEMU's mirror can't follow them: its filter refuses such a command, so the guest's
//! reads and writes would fail from the moment when the mirror starts.

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// The devices that pass commands through.
const DEVICES: [&str; 2] = ["scsi-block", "scsi-generic"];

/// Why such a disk can't move.
pub(super) const PASSED_THROUGH: &str = "the guest's SCSI commands are passed through to it \
                                         (scsi-block, scsi-generic), and they would fail while \
                                         it is copied";

/// Whether the guest's commands are passed through to one of the drives of `query-block`.
pub(super) fn is_passed_through(qmp: &Qmp, drive: &Value) -> Result<bool, QmpError> {
    let Some(path) = device_path(drive) else { return Ok(false) };
    match qmp.execute("qom-get", json!({ "path": path, "property": "type" })) {
        Ok(kind) => Ok(kind.as_str().is_some_and(|kind| DEVICES.contains(&kind))),
        // The device was just unplugged.
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where QEMU has the guest's device.
pub(crate) fn device_path(drive: &Value) -> Option<String> {
    match drive["qdev"].as_str()? {
        "" => None,
        path if path.starts_with('/') => Some(path.to_owned()),
        // A device with an id is shown by that alone.
        id => Some(format!("/machine/peripheral/{id}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::played::played;

    #[test]
    fn a_device_is_known_by_its_id_or_path() {
        let path = |qdev: &str| device_path(&json!({ "qdev": qdev }));
        assert_eq!(path("lun0").as_deref(), Some("/machine/peripheral/lun0"));
        let inner = "/machine/peripheral/disk0/virtio-backend";
        assert_eq!(path(inner).as_deref(), Some(inner));
        assert_eq!(path(""), None);
        assert_eq!(device_path(&json!({ "device": "d0" })), None);
    }

    #[test]
    fn the_device_tells_whether_commands_are_passed_through() {
        let (_dir, qmp, player) = played(|command| {
            let mut answer = match command["arguments"]["path"].as_str().unwrap() {
                "/machine/peripheral/lun0" => json!({ "return": "scsi-block" }),
                "/machine/peripheral/sg0" => json!({ "return": "scsi-generic" }),
                "/machine/peripheral/disk0" => json!({ "return": "scsi-hd" }),
                _ => json!({ "error": { "class": "DeviceNotFound", "desc": "no such device" } }),
            };
            answer["id"] = command["id"].clone();
            Some(format!("{answer}\n"))
        });
        let qmp = qmp.unwrap();
        for (device, expected) in [("lun0", true), ("sg0", true), ("disk0", false), ("x", false)] {
            let drive = json!({ "qdev": device });
            assert_eq!(is_passed_through(&qmp, &drive).unwrap(), expected, "{device}");
        }
        assert!(!is_passed_through(&qmp, &json!({ "device": "d0" })).unwrap());
        drop(qmp);
        player.join().unwrap();
    }
}
