//! Queries QEMU for a VM's shape.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Device, Drive, FeatureWord, Image, Medium, Memory, Node, Shape, features};
use crate::qmp::{Qmp, QmpError, TIMEOUT, list, odd};

/// Where QEMU has the devices from the command line or from hotplug: those that the user
/// named, and the others.
const NAMED: &str = "/machine/peripheral";
const ANONYMOUS: &str = "/machine/peripheral-anon";
/// Where QEMU has devices of other options, such as `-nic`.
const MADE_BY_QEMU: &str = "/machine/unattached";

/// A chain of backing files longer than this is a loop.
const CHAIN_MAX: usize = 1000;

/// Drivers whose nodes are layers over other nodes, not where the bytes are.
const LAYERS: [&str; 22] = [
    "raw",
    "qcow2",
    "qcow",
    "qed",
    "vmdk",
    "vdi",
    "vhdx",
    "vpc",
    "parallels",
    "cloop",
    "dmg",
    "bochs",
    "luks",
    "throttle",
    "copy-on-read",
    "snapshot-access",
    "copy-before-write",
    "compress",
    "preallocate",
    "blkdebug",
    "blkverify",
    "quorum",
];

/// What the live VM consists of.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn of(qmp: &Qmp) -> Result<Shape, QmpError> {
    let Vcpus { kind: cpu, features: cpu_features, count: vcpus } = vcpus(qmp)?;
    let mut memory: Vec<Memory> = qmp
        .memory_backends()?
        .into_iter()
        .map(|backend| Memory { id: backend.id, bytes: backend.bytes })
        .collect();
    memory.sort_by(|a, b| a.id.cmp(&b.id));
    let mut plugged = devices(qmp, NAMED, true)?;
    plugged.extend(devices(qmp, ANONYMOUS, false)?);
    let (nodes, images) = nodes(qmp)?;
    Ok(Shape {
        machine: machine_of(qmp)?,
        cpu,
        cpu_features,
        vcpus,
        ram_bytes: base_memory(qmp)?,
        memory,
        unplugged: qmp.unplugged()?,
        memory_devices: memory_devices(qmp)?,
        devices: plugged,
        drives: drives_of(qmp, TIMEOUT)?,
        nodes,
        images,
        pid: qmp.process_of_vcpu(),
    })
}

/// A live VM's machine type alone, with its version.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn machine_of(qmp: &Qmp) -> Result<String, QmpError> {
    let answer = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = answer.as_str().ok_or_else(|| odd("qom-get", &answer))?;
    Ok(kind.strip_suffix("-machine").unwrap_or(kind).to_owned())
}

fn base_memory(qmp: &Qmp) -> Result<u64, QmpError> {
    let answer = qmp.execute("query-memory-size-summary", json!({}))?;
    answer["base-memory"].as_u64().ok_or_else(|| odd("query-memory-size-summary", &answer))
}

struct Vcpus {
    kind: String,
    features: Vec<FeatureWord>,
    count: u32,
}

/// The number and kind of the vCPUs; all are of one kind.
fn vcpus(qmp: &Qmp) -> Result<Vcpus, QmpError> {
    let plugged = qmp.execute("query-cpus-fast", json!({}))?;
    let paths =
        list(&plugged, "query-cpus-fast", |one| Some(one["qom-path"].as_str()?.to_owned()))?;
    let count = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    let Some(first) = paths.first() else {
        return Ok(Vcpus { kind: String::new(), features: Vec::new(), count });
    };
    let of_first = |property| json!({ "path": first, "property": property });
    let kind = qmp.execute("qom-get", of_first("type"))?;
    let features = match qmp.execute("qom-get", of_first("feature-words")) {
        Ok(answer) => features::words(&answer),
        // Other architectures don't have this property.
        Err(QmpError::Refused { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(Vcpus { kind: kind.as_str().unwrap_or_default().to_owned(), features, count })
}

fn devices(qmp: &Qmp, path: &str, named: bool) -> Result<Vec<Device>, QmpError> {
    let children = children(qmp, path)?.into_iter();
    let mut devices: Vec<Device> =
        children.map(|(name, kind)| Device { id: named.then_some(name), kind }).collect();
    devices.sort_by(|a, b| (&a.id, &a.kind).cmp(&(&b.id, &b.kind)));
    Ok(devices)
}

/// The names and types of what is at that path.
fn children(qmp: &Qmp, path: &str) -> Result<Vec<(String, String)>, QmpError> {
    let answer = qmp.execute("qom-list", json!({ "path": path }))?;
    let properties = list(&answer, "qom-list", |one| {
        Some((one["name"].as_str()?.to_owned(), one["type"].as_str()?.to_owned()))
    })?;
    let children = properties.into_iter().filter_map(|(name, kind)| {
        let kind = kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
        Some((name, kind))
    });
    Ok(children.collect())
}

/// The paths and kinds of plugged devices whose kind starts so.
pub(crate) fn plugged(qmp: &Qmp, kind: &str) -> Result<Vec<(String, String)>, QmpError> {
    let mut found = Vec::new();
    for path in [NAMED, ANONYMOUS] {
        let of_kind = children(qmp, path)?.into_iter().filter(|(_, its)| its.starts_with(kind));
        found.extend(of_kind.map(|(name, its)| (format!("{path}/{name}"), its)));
    }
    Ok(found)
}

/// Whether the guest may report free memory through a balloon: QEMU leaves that out of a
/// migration. Only QEMU knows: a balloon may come from a file, or be plugged in later.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn has_free_page_hint(qmp: &Qmp) -> Result<bool, QmpError> {
    for (path, _) in plugged(qmp, "virtio-balloon")? {
        let hint = json!({ "path": path, "property": "free-page-hint" });
        match qmp.execute("qom-get", hint) {
            Ok(answer) if answer.as_bool() == Some(true) => return Ok(true),
            // A balloon without this property can't report anything.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Whether the VM has a virtio network card.
pub(crate) fn has_virtio_net(qmp: &Qmp) -> Result<bool, QmpError> {
    for path in [NAMED, ANONYMOUS, MADE_BY_QEMU] {
        if children(qmp, path)?.iter().any(|(_, kind)| kind.starts_with("virtio-net")) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn memory_devices(qmp: &Qmp) -> Result<Vec<Device>, QmpError> {
    let answer = qmp.execute("query-memory-devices", json!({}))?;
    list(&answer, "query-memory-devices", |one| {
        let id = one["data"]["id"].as_str().map(str::to_owned);
        Some(Device { id, kind: one["type"].as_str()?.to_owned() })
    })
}

/// The live VM's drives, with the medium in each.
///
/// # Errors
/// If QEMU doesn't answer within `timeout`.
pub fn drives_of(qmp: &Qmp, timeout: Duration) -> Result<Vec<Drive>, QmpError> {
    let answer = qmp.execute_within("query-block", json!({}), timeout)?;
    let mut drives = list(&answer, "query-block", |one| {
        Some(Drive {
            name: drive_name(one),
            removable: one["removable"].as_bool()?,
            medium: one.get("inserted").map(medium),
        })
    })?;
    drives.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(drives)
}

/// The id of `-drive`, or of the device that `-device` put on a node: paths of
/// devices that QEMU creates itself differ between versions.
pub(crate) fn drive_name(one: &Value) -> String {
    let device = one["device"].as_str().unwrap_or_default();
    if !device.is_empty() {
        return device.to_owned();
    }
    let path = one["qdev"].as_str().unwrap_or_default();
    path.trim_start_matches("/machine/peripheral/").trim_end_matches("/virtio-backend").to_owned()
}

fn is_layer(node: &Node) -> bool {
    LAYERS.contains(&node.driver.as_str())
}

/// Whether nothing writes to an image. With `auto-read-only`, as libvirt has it, QEMU shows a file
/// as writable that it opens for writing only when a layer over it does.
fn is_read_only(image: &Node, all: &[(Node, u64)]) -> bool {
    let is_over = |node: &&Node| is_layer(node) && node.file == image.file;
    let mut layers = all.iter().map(|(node, _)| node).filter(is_over).peekable();
    image.read_only || layers.peek().is_some() && layers.all(|node| node.read_only)
}

/// The names of the block nodes under each of the live VM's drives. While these are the same, no
/// drive holds other files. QEMU touches no image to say that.
///
/// # Errors
/// If QEMU doesn't answer within `timeout`.
pub fn node_names(qmp: &Qmp, timeout: Duration) -> Result<Vec<(String, Vec<String>)>, QmpError> {
    let answer = qmp.execute_within("query-blockstats", json!({}), timeout)?;
    let mut drives = list(&answer, "query-blockstats", |one| {
        let mut names = Vec::new();
        add_names(one, &mut names);
        Some((drive_name(one), names))
    })?;
    drives.sort();
    Ok(drives)
}

fn add_names(stats: &Value, names: &mut Vec<String>) {
    names.extend(stats["node-name"].as_str().map(str::to_owned));
    for below in ["parent", "backing"] {
        if let Some(below) = stats.get(below) {
            add_names(below, names);
        }
    }
}

/// An image, and those below it.
pub(crate) fn chain(image: &Value) -> impl Iterator<Item = &Value> {
    std::iter::successors(Some(image), |image| image.get("backing-image")).take(CHAIN_MAX)
}

/// The files below an image, nearest first.
pub(crate) fn backing(image: &Value) -> Vec<String> {
    let file = |below: &Value| below["filename"].as_str().unwrap_or_default().to_owned();
    chain(image).skip(1).map(file).collect()
}

fn medium(inserted: &Value) -> Medium {
    let mut files = vec![inserted["file"].as_str().unwrap_or_default().to_owned()];
    files.extend(backing(&inserted["image"]));
    Medium {
        driver: inserted["drv"].as_str().unwrap_or_default().to_owned(),
        files,
        read_only: inserted["ro"].as_bool().unwrap_or(false),
        bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or(0),
    }
}

fn nodes(qmp: &Qmp) -> Result<(Vec<Node>, Vec<Image>), QmpError> {
    let answer = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let all = list(&answer, "query-named-block-nodes", |one| {
        let node = Node {
            name: one["node-name"].as_str()?.to_owned(),
            driver: one["drv"].as_str()?.to_owned(),
            file: one["file"].as_str()?.to_owned(),
            read_only: one["ro"].as_bool()?,
        };
        Some((node, one["image"]["virtual-size"].as_u64().unwrap_or(0)))
    })?;
    let mut images = BTreeSet::new();
    for (node, bytes) in &all {
        if !is_layer(node) {
            images.insert(Image {
                driver: node.driver.clone(),
                file: node.file.clone(),
                read_only: is_read_only(node, &all),
                bytes: *bytes,
            });
        }
    }
    // QEMU's own names start with `#` and differ each time.
    let mut nodes: Vec<Node> =
        all.into_iter().map(|(node, _)| node).filter(|node| !node.name.starts_with('#')).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok((nodes, images.into_iter().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_are_called_what_the_user_calls_them() {
        let name = |device: &str, qdev: &str| drive_name(&json!({"device": device, "qdev": qdev}));
        assert_eq!(name("virtio0", "/machine/peripheral-anon/device[1]/virtio-backend"), "virtio0");
        assert_eq!(name("", "/machine/peripheral/disk0/virtio-backend"), "disk0");
        assert_eq!(name("", "disk0"), "disk0");
    }

    #[test]
    fn a_file_is_read_only_if_each_layer_over_it_is() {
        let node = |driver: &str, file: &str, read_only: bool| {
            let (name, driver, file) = (String::new(), driver.to_owned(), file.to_owned());
            (Node { name, driver, file, read_only }, 0)
        };
        let all = [
            node("file", "/cd.iso", false),
            node("raw", "/cd.iso", true),
            node("file", "/disk", false),
            node("raw", "/disk", false),
            node("raw", "/disk", true),
            node("file", "/alone", false),
            node("file", "/base", true),
        ];
        let images = all.iter().map(|(node, _)| node).filter(|node| !is_layer(node));
        let read_only: Vec<bool> = images.map(|image| is_read_only(image, &all)).collect();
        assert_eq!(read_only, [true, false, false, true]);
    }

    #[test]
    fn all_nodes_under_a_drive_are_named() {
        let stats = json!({"node-name": "top", "parent": {"node-name": "file"},
            "backing": {"node-name": "base", "parent": {"node-name": "base-file"}}});
        let mut names = Vec::new();
        add_names(&stats, &mut names);
        assert_eq!(names, ["top", "file", "base", "base-file"]);
    }

    #[test]
    fn a_medium_names_the_files_behind_it() {
        let inserted = json!({"file": "c", "drv": "qcow2", "ro": false, "image": {
            "virtual-size": 7, "filename": "c",
            "backing-image": {"filename": "b", "backing-image": {"filename": "a"}}}});
        let medium = medium(&inserted);
        assert_eq!(medium.files, ["c", "b", "a"]);
        assert_eq!((medium.driver.as_str(), medium.bytes), ("qcow2", 7));
        assert_eq!(super::medium(&json!(null)).files, [""]);
    }
}
