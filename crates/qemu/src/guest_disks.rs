//! Which of QEMU's disks a guest reports, and how their content can be read
//! without QEMU, from any host that shares the storage.
//!
//! A helper in a guest knows a disk by its serial number, its PCI address and its
//! size ([`cachemap::Device`]); QEMU knows it as a device with a tree of block nodes
//! below. Only certain matches count ([`matched`]), and only a disk that reads the
//! same from outside has another [`Reading`] than [`Reading::No`]: pages that are read
//! are verified by their hash, but reads that never match would be wasted.

mod graph;
mod matching;
mod reading;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

pub use matching::{Unmatched, matched};
pub use reading::{NbdServer, Reading};

use graph::Graph;

/// Where QEMU keeps devices: those with an id and those without.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// The child of a device that is its disk.
pub(crate) const BACKEND: &str = "/virtio-backend";

/// A virtio disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDisk {
    /// QEMU's path of the guest's device, the same at both ends of a migration.
    pub device: String,
    /// The serial number that the guest sees; empty if it has none.
    pub serial: String,
    /// Its PCI address as the guest sees it, such as `0000:00:03.0`; none on
    /// another bus, or behind a bridge that the guest hasn't numbered.
    pub address: Option<String>,
    /// The size that the guest sees; 0 if that isn't known.
    pub bytes: u64,
    /// The topmost node.
    pub node: String,
    /// The format: `raw`, `qcow2`...
    pub format: String,
    /// How the image is reached: `file`, `host_device`, `nbd`...
    pub protocol: String,
    /// The image, as QEMU names it.
    pub file: String,
    /// Its backing files, nearest first.
    pub backing: Vec<String>,
    /// Whether the guest can't write to it.
    pub read_only: bool,
    /// Whether QEMU bypasses the host's page cache for the image. If not, another
    /// host may read stale data for a while.
    pub direct: bool,
    /// How its content can be read.
    pub reading: Reading,
}

/// QEMU's answers.
#[derive(Debug)]
pub(crate) struct QemuAnswers {
    pub(crate) drives: Value,
    pub(crate) nodes: Value,
    pub(crate) graph: Value,
    pub(crate) pci: Value,
    pub(crate) devices: Vec<Plugged>,
}

/// A virtio disk among QEMU's devices.
#[derive(Clone, Debug)]
pub(crate) struct Plugged {
    pub(crate) path: String,
    pub(crate) serial: String,
    /// Slot and function.
    pub(crate) devfn: Option<u64>,
    pub(crate) bus: String,
}

/// The virtio disks of a VM that have a medium. Relative paths start at
/// `cwd`, QEMU's directory.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn disks(qmp: &Qmp, cwd: &Path) -> Result<Vec<GuestDisk>, QmpError> {
    let said = QemuAnswers {
        devices: plugged(qmp)?,
        drives: qmp.execute("query-block", json!({}))?,
        nodes: qmp.execute("query-named-block-nodes", json!({ "flat": true }))?,
        graph: qmp.execute("x-debug-query-block-graph", json!({}))?,
        // Machines without PCI refuse it.
        pci: qmp.execute("query-pci", json!({})).or_else(refused)?,
    };
    Ok(said.disks(cwd))
}

fn refused(error: QmpError) -> Result<Value, QmpError> {
    match error {
        QmpError::Refused { .. } => Ok(Value::Null),
        error => Err(error),
    }
}

fn plugged(qmp: &Qmp) -> Result<Vec<Plugged>, QmpError> {
    let mut found = Vec::new();
    for container in DEVICES {
        let children = qmp.execute("qom-list", json!({ "path": container }))?;
        for name in children.as_array().into_iter().flatten().filter_map(disk_child) {
            let path = format!("{container}/{name}");
            let get = |property: &str| {
                let arguments = json!({ "path": path, "property": property });
                qmp.execute("qom-get", arguments).or_else(refused)
            };
            let device = json!({ "path": path, "serial": get("serial")?, "addr": get("addr")?,
                "parent_bus": get("parent_bus")? });
            found.extend(Plugged::read(&device));
        }
    }
    Ok(found)
}

fn disk_child(child: &Value) -> Option<&str> {
    let is_disk = child["type"].as_str()?.starts_with("child<virtio-blk-");
    child["name"].as_str().filter(|_| is_disk)
}

impl Plugged {
    fn read(device: &Value) -> Option<Self> {
        let text = |name: &str| device[name].as_str().unwrap_or_default().to_owned();
        Some(Self {
            path: device["path"].as_str()?.to_owned(),
            serial: text("serial"),
            devfn: device["addr"].as_u64(),
            bus: text("parent_bus"),
        })
    }

    /// Its PCI address, with the bus numbers that firmware or guest have given to
    /// the bridges above it.
    fn address(&self, buses: &BTreeMap<String, u64>) -> Option<String> {
        let devfn = self.devfn.filter(|devfn| *devfn < 256)?;
        let (owner, name) = self.bus.rsplit_once('/')?;
        let bus = match owner.strip_prefix("/machine/peripheral/") {
            Some(bridge) => *buses.get(bridge)?,
            None if matches!(name, "pci.0" | "pcie.0") => 0,
            None => return None,
        };
        Some(format!("0000:{bus:02x}:{:02x}.{:x}", devfn >> 3, devfn & 7))
    }
}

impl QemuAnswers {
    pub(crate) fn disks(&self, cwd: &Path) -> Vec<GuestDisk> {
        let graph = Graph::of(&self.nodes, &self.graph);
        let mut buses = BTreeMap::new();
        for root in self.pci.as_array().into_iter().flatten() {
            note_buses(&root["devices"], &mut buses, 0);
        }
        let drives = self.drives.as_array().map(Vec::as_slice).unwrap_or_default();
        let disk = |device: &Plugged| {
            let path = format!("{}{BACKEND}", device.path);
            let drive = drives.iter().find(|drive| drive["qdev"].as_str() == Some(&path))?;
            let root = graph.node(drive["inserted"]["node-name"].as_str()?)?;
            let image = reading::image(&graph, root, cwd);
            Some(GuestDisk {
                device: device.path.clone(),
                serial: device.serial.clone(),
                address: device.address(&buses),
                bytes: root.bytes,
                node: root.name.to_owned(),
                format: image.format,
                protocol: image.protocol,
                file: image.file,
                backing: image.backing,
                read_only: root.read_only,
                direct: root.direct,
                reading: image.reading,
            })
        };
        self.devices.iter().filter_map(disk).collect()
    }
}

/// Collects the numbers of the buses behind bridges that have an id. Before the guest or
/// its firmware has assigned them, they are 0.
fn note_buses(devices: &Value, buses: &mut BTreeMap<String, u64>, depth: u32) {
    /// A PCI segment has no more buses.
    const DEPTH_MAX: u32 = 256;
    if depth == DEPTH_MAX {
        return;
    }
    for device in devices.as_array().into_iter().flatten() {
        let bridge = &device["pci_bridge"];
        let number = bridge["bus"]["secondary"].as_u64();
        if let (Some(id), Some(number @ 1..=255)) = (device["qdev_id"].as_str(), number) {
            buses.insert(id.to_owned(), number);
        }
        note_buses(&bridge["devices"], buses, depth + 1);
    }
}

/// The disks in any answers, for the fuzzer and the tests.
pub(crate) fn of_answers(answers: &Value) -> Vec<GuestDisk> {
    let said = QemuAnswers {
        drives: answers["query-block"].clone(),
        nodes: answers["query-named-block-nodes"].clone(),
        graph: answers["x-debug-query-block-graph"].clone(),
        pci: answers["query-pci"].clone(),
        devices: answers["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Plugged::read)
            .collect(),
    };
    said.disks(Path::new("/srv"))
}

#[cfg(test)]
mod tests;
