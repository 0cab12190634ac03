//! The disks among QEMU's devices, and what the guest's kernel knows them by.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use super::refused;
use crate::qmp::{Qmp, QmpError};

/// Where QEMU keeps devices: those with an id and those without.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// The child of a device that is its disk, or to which its SCSI bus belongs.
const BACKEND: &str = "/virtio-backend";
/// How much of a serial number virtio-blk passes to the guest.
const BLK_SERIAL_BYTES: usize = 20;
/// The same for QEMU's SCSI disks.
const SCSI_SERIAL_BYTES: usize = 36;
/// Larger units have a flag in their numbers, which the guest's kernel shows.
const PLAIN_LUNS: u64 = 256;
const FLAT_LUN: u64 = 0x4000;

/// A disk among QEMU's devices.
#[derive(Clone, Debug)]
pub(crate) struct Plugged {
    pub(crate) path: String,
    pub(crate) serial: String,
    pub(crate) attached: Attached,
    /// Slot and function, of its controller if it has one.
    pub(crate) devfn: Option<u64>,
    /// The PCI bus.
    pub(crate) bus: String,
}

/// What a disk is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    /// A device of its own.
    Blk,
    /// A virtio-scsi controller, as this unit. `None` if that isn't known.
    Scsi(Option<Unit>),
}

/// A unit on a SCSI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) channel: u64,
    pub(crate) target: u64,
    pub(crate) lun: u64,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { channel, target, lun } = self;
        let lun = if *lun < PLAIN_LUNS { *lun } else { lun | FLAT_LUN };
        write!(f, "{channel}:{target}:{lun}")
    }
}

/// All that QEMU has.
pub(super) fn all(qmp: &Qmp) -> Result<Vec<Plugged>, QmpError> {
    let mut found = Vec::new();
    for container in DEVICES {
        let children = qmp.execute("qom-list", json!({ "path": container }))?;
        for child in children.as_array().into_iter().flatten() {
            let (Some(name), Some(kind)) = (child["name"].as_str(), child["type"].as_str()) else {
                continue;
            };
            let path = format!("{container}/{name}");
            let get = |path: &str, property: &str| {
                let arguments = json!({ "path": path, "property": property });
                qmp.execute("qom-get", arguments).or_else(refused)
            };
            let mut device = json!({ "path": path });
            let mut of_pci = path.clone();
            if kind == "child<scsi-hd>" {
                let bus = get(&path, "parent_bus")?;
                let Some(controller) = bus.as_str().and_then(controller) else { continue };
                controller.clone_into(&mut of_pci);
                for property in ["channel", "scsi-id", "lun"] {
                    device[property] = get(&path, property)?;
                }
            } else if !kind.starts_with("child<virtio-blk-") {
                continue;
            }
            device["serial"] = get(&path, "serial")?;
            for property in ["addr", "parent_bus"] {
                device[property] = get(&of_pci, property)?;
            }
            found.extend(Plugged::read(&device));
        }
    }
    Ok(found)
}

/// The virtio-scsi controller to which a SCSI bus belongs. None if another device does.
fn controller(bus: &str) -> Option<&str> {
    bus.rsplit_once('/')?.0.strip_suffix(BACKEND)
}

impl Plugged {
    /// From what QEMU reports of it.
    pub(super) fn read(device: &Value) -> Option<Self> {
        let text = |name: &str| device[name].as_str().unwrap_or_default().to_owned();
        let number = |name: &str| device[name].as_u64();
        let unit = || {
            let (channel, target) = (number("channel")?, number("scsi-id")?);
            Some(Unit { channel, target, lun: number("lun")? })
        };
        let is_scsi = device.get("scsi-id").is_some();
        Some(Self {
            path: device["path"].as_str()?.to_owned(),
            serial: text("serial"),
            attached: if is_scsi { Attached::Scsi(unit()) } else { Attached::Blk },
            devfn: number("addr"),
            bus: text("parent_bus"),
        })
    }

    /// The object that uses its drive.
    pub(crate) fn user(&self) -> String {
        match self.attached {
            Attached::Blk => format!("{}{BACKEND}", self.path),
            Attached::Scsi(_) => self.path.clone(),
        }
    }

    /// Its serial number as the guest's kernel and the helper show it.
    pub(super) fn seen_serial(&self) -> String {
        let bytes = match self.attached {
            Attached::Blk => BLK_SERIAL_BYTES,
            Attached::Scsi(_) => SCSI_SERIAL_BYTES,
        };
        let cut = self.serial.as_bytes().get(..bytes).unwrap_or(self.serial.as_bytes());
        let text = String::from_utf8_lossy(cut);
        let shown: String = text.chars().filter(|letter| matches!(letter, ' '..='~')).collect();
        shown.trim().to_owned()
    }

    /// Its address, with the bus numbers that firmware or guest have given to
    /// the bridges above it.
    pub(super) fn address(&self, buses: &BTreeMap<String, u64>) -> Option<String> {
        let devfn = self.devfn.filter(|devfn| *devfn < 256)?;
        let (owner, name) = self.bus.rsplit_once('/')?;
        let bus = match owner.strip_prefix("/machine/peripheral/") {
            Some(bridge) => *buses.get(bridge)?,
            None if matches!(name, "pci.0" | "pcie.0") => 0,
            None => return None,
        };
        let pci = format!("0000:{bus:02x}:{:02x}.{:x}", devfn >> 3, devfn & 7);
        match self.attached {
            Attached::Blk => Some(pci),
            Attached::Scsi(unit) => unit.map(|unit| format!("{pci}/{unit}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_virtio_controllers_count() {
        let bus = "/machine/peripheral/scsi0/virtio-backend/scsi0.0";
        assert_eq!(controller(bus), Some("/machine/peripheral/scsi0"));
        assert_eq!(controller("/machine/peripheral/lsi/scsi.0"), None);
        assert_eq!(controller(""), None);
    }

    #[test]
    fn units_are_shown_as_the_guests_kernel_shows_them() {
        let shown = |lun| Unit { channel: 0, target: 3, lun }.to_string();
        assert_eq!([0, 255, 256].map(shown), ["0:3:0", "0:3:255", "0:3:16640"]);
    }
}
