//! Which of QEMU's disks a guest reports, and how their content can be read
//! without QEMU, from any host that shares the storage.
//!
//! A helper in a guest knows a disk by its serial number, its address and its
//! size ([`cachemap::Device`]); QEMU knows it as a device with a tree of block nodes
//! below. Only certain matches count ([`matched`]), and only a disk that reads the
//! same from outside has another [`Reading`] than [`Reading::No`]: pages that are read
//! are verified by their hash, but reads that never match would be wasted.

mod graph;
mod matching;
mod plugged;
mod reading;
mod services;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::disks::device_path;
use crate::qmp::{Qmp, QmpError};

pub use matching::{Unmatched, matched};
pub use reading::{NbdServer, Reading};

pub(crate) use plugged::{Attached, Plugged, Unit};

use graph::Graph;

/// A disk of a VM: of virtio-blk, or of a virtio-scsi controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDisk {
    /// QEMU's path of the guest's device, the same at both ends of a migration.
    pub device: String,
    /// The serial number that the guest sees; empty if it has none.
    pub serial: String,
    /// Its PCI address as the guest sees it, such as `0000:00:03.0`, or its
    /// controller's with its unit, such as `0000:00:03.0/0:1:0`; none on
    /// another bus, or behind a bridge that the guest hasn't numbered.
    pub address: Option<String>,
    /// The size that the guest sees; 0 if that isn't known.
    pub bytes: u64,
    /// The topmost node.
    pub node: String,
    /// The image, as QEMU names it.
    pub file: String,
    /// Whether the guest can't write to it.
    pub read_only: bool,
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

/// The virtio disks of a VM that have a medium. Relative paths start at
/// `cwd`, QEMU's directory.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn disks(qmp: &Qmp, cwd: &Path) -> Result<Vec<GuestDisk>, QmpError> {
    let said = QemuAnswers {
        devices: plugged::all(qmp)?,
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

impl QemuAnswers {
    pub(crate) fn disks(&self, cwd: &Path) -> Vec<GuestDisk> {
        let graph = Graph::of(&self.nodes, &self.graph);
        let mut buses = BTreeMap::new();
        for root in self.pci.as_array().into_iter().flatten() {
            note_buses(&root["devices"], &mut buses, 0);
        }
        let drives = self.drives.as_array().map(Vec::as_slice).unwrap_or_default();
        let disk = |device: &Plugged| {
            let user = device.user();
            let drive = drives.iter().find(|drive| device_path(drive).as_ref() == Some(&user))?;
            let root = graph.node(drive["inserted"]["node-name"].as_str()?)?;
            Some(GuestDisk {
                device: device.path.clone(),
                serial: device.seen_serial(),
                address: device.address(&buses),
                bytes: root.bytes,
                node: root.name.to_owned(),
                file: reading::file(&graph, root),
                read_only: root.read_only,
                reading: reading::of(&graph, root, cwd),
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
