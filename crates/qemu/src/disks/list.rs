//! The VM's disks, as an operator knows them, and which of them can move.

use facts::disks::{Format, Qcow2};
use serde_json::{Value, json};

use super::passed_through::{PASSED_THROUGH, is_passed_through};
use crate::qmp::{Qmp, QmpError};
use crate::shape::{Shape, backing, chain};

/// Protocols of images on this host.
const LOCAL: [&str; 2] = ["file", "host_device"];

/// A disk of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Its name, as in [`crate::shape::Drive`].
    pub name: String,
    /// Its other names: its device's id, its node's name.
    pub other_names: Vec<String>,
    /// The node that the guest's device uses.
    pub node: String,
    /// The id of the guest's device in `block_set_io_throttle`.
    pub guest: String,
    /// The image's format.
    pub format: Option<Format>,
    /// How the image is reached: `file`, `host_device`, `nbd`...
    pub protocol: String,
    /// The image, as QEMU names it.
    pub file: String,
    /// Its backing files, nearest first.
    pub backing: Vec<String>,
    /// The size that the guest sees.
    pub bytes: u64,
    /// What the image and its backing files take up at the source.
    pub allocated_bytes: u64,
    /// Whether QEMU bypasses the host's page cache for the image.
    pub direct: bool,
    /// Whether the guest can't write to it.
    pub read_only: bool,
    /// Why it doesn't move, if so.
    pub stays: Option<Stays>,
    /// What a mirror leaves behind of the image, in sentences for the operator.
    pub notes: Vec<String>,
}

/// Why a disk doesn't move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stays {
    /// There is nothing to move, or the destination has it already.
    ByNature(String),
    /// It would have to move, and can't.
    Refused(String),
}

impl Stays {
    /// The reason.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::ByNature(reason) | Self::Refused(reason) => reason,
        }
    }
}

/// The disks of the VM that has this shape.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn disks(qmp: &Qmp, shape: &Shape) -> Result<Vec<Disk>, QmpError> {
    let answer = qmp.execute("query-block", json!({}))?;
    let drives = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut disks = Vec::with_capacity(drives.len());
    for drive in drives {
        let mut disk = disk(drive, shape);
        if disk.stays.is_none() && is_passed_through(qmp, drive)? {
            disk.stays = Some(Stays::Refused(PASSED_THROUGH.to_owned()));
        }
        disks.push(disk);
    }
    disks.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(disks)
}

/// The id of the guest's device in `block_set_io_throttle`.
pub(crate) fn guest_id(drive: &Value) -> String {
    let text = |name: &str| drive[name].as_str().unwrap_or_default().to_owned();
    let path = text("qdev");
    if path.is_empty() { text("device") } else { path }
}

fn disk(drive: &Value, shape: &Shape) -> Disk {
    let inserted = &drive["inserted"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = crate::shape::drive_name(drive);
    let node = text(&inserted["node-name"]);
    let image = &inserted["image"];
    let (protocol, file) = bottom(&text(&inserted["file"]), shape);
    let mut disk = Disk {
        other_names: other_names(drive, &name, &node),
        name,
        node,
        guest: guest_id(drive),
        format: format(inserted),
        protocol,
        file,
        backing: backing(image),
        bytes: image["virtual-size"].as_u64().unwrap_or(0),
        allocated_bytes: allocated(image),
        direct: inserted["cache"]["direct"].as_bool().unwrap_or(false),
        read_only: inserted["ro"].as_bool().unwrap_or(false),
        stays: None,
        notes: notes(inserted),
    };
    disk.stays = stays(&disk, inserted, shape);
    disk
}

fn other_names(drive: &Value, name: &str, node: &str) -> Vec<String> {
    let path = drive["qdev"].as_str().unwrap_or_default();
    let device =
        path.trim_start_matches("/machine/peripheral/").trim_end_matches("/virtio-backend");
    // QEMU's own names start with `#` and differ each time.
    let node = Some(node).filter(|node| !node.starts_with('#'));
    let mut names: Vec<String> =
        [Some(device), node].into_iter().flatten().map(str::to_owned).collect();
    names.retain(|other| !other.is_empty() && other != name);
    names.dedup();
    names
}

/// The protocol and the file below all formats. QEMU describes an image in JSON if
/// a name doesn't suffice.
fn bottom(named: &str, shape: &Shape) -> (String, String) {
    if let Some(described) = named.strip_prefix("json:")
        && let Ok(mut node) = serde_json::from_str::<Value>(described)
    {
        while node["file"].is_object() {
            node = node["file"].take();
        }
        let driver = node["driver"].as_str().unwrap_or_default().to_owned();
        let file = node["filename"].as_str().unwrap_or(named).to_owned();
        return (driver, file);
    }
    let image = shape.images.iter().find(|image| image.file == named);
    (image.map(|image| image.driver.clone()).unwrap_or_default(), named.to_owned())
}

/// What an image takes up, and what is below it: at the destination they are one.
fn allocated(image: &Value) -> u64 {
    let taken = |image: &Value| image["actual-size"].as_u64().unwrap_or(0);
    let all = chain(image).map(taken).fold(0, u64::saturating_add);
    // What images above cover is not copied, and of a larger one below only the beginning.
    let most = image["virtual-size"].as_u64().unwrap_or(u64::MAX);
    if image.get("backing-image").is_some() { all.min(most) } else { all }
}

fn format(inserted: &Value) -> Option<Format> {
    let image = &inserted["image"];
    let more = &image["format-specific"]["data"];
    let usual = Qcow2::default();
    match inserted["drv"].as_str()? {
        "raw" => Some(Format::Raw),
        "qcow2" => Some(Format::Qcow2(Qcow2 {
            cluster_bytes: image["cluster-size"].as_u64().unwrap_or(usual.cluster_bytes),
            compat: more["compat"].as_str().unwrap_or("1.1").to_owned(),
            lazy_refcounts: more["lazy-refcounts"].as_bool().unwrap_or(usual.lazy_refcounts),
            refcount_bits: more["refcount-bits"].as_u64().unwrap_or(usual.refcount_bits),
            extended_l2: more["extended-l2"].as_bool().unwrap_or(usual.extended_l2),
        })),
        _ => None,
    }
}

fn notes(inserted: &Value) -> Vec<String> {
    let image = &inserted["image"];
    let mut notes = Vec::new();
    let snapshots = image["snapshots"].as_array().map_or(0, Vec::len);
    if snapshots > 0 {
        notes.push(format!("{snapshots} snapshots inside the image stay behind"));
    }
    if image["format-specific"]["data"]["bitmaps"].as_array().is_some_and(|all| !all.is_empty()) {
        notes.push("the image's dirty bitmaps stay behind: the next backup is a full one".into());
    }
    if image.get("backing-image").is_some() {
        notes.push("at the destination it is one image, without a backing file".into());
    }
    notes
}

fn stays(disk: &Disk, inserted: &Value, shape: &Shape) -> Option<Stays> {
    let by_nature = |reason: &str| Some(Stays::ByNature(reason.to_owned()));
    let refused = |reason: String| Some(Stays::Refused(reason));
    if !inserted.is_object() {
        return by_nature("no medium is in it");
    }
    if disk.read_only {
        return by_nature("the guest can't write to it: have the same image at both hosts");
    }
    let network = super::challenge::NETWORK.contains(&disk.protocol.as_str());
    if network || super::challenge::EMPTY.contains(&disk.protocol.as_str()) {
        return Some(Stays::ByNature(format!(
            "it is not an image of this host ({})",
            disk.protocol
        )));
    }
    if !LOCAL.contains(&disk.protocol.as_str()) {
        return refused(format!("Droveway can't move a disk of the protocol `{}`", disk.protocol));
    }
    let image = &inserted["image"];
    let is_encrypted = |value: &Value| value["encrypted"].as_bool().unwrap_or(false);
    if is_encrypted(inserted) || is_encrypted(image) {
        return refused("its image is encrypted, and the key is QEMU's alone".to_owned());
    }
    if disk.format.is_none() {
        let driver = inserted["drv"].as_str().unwrap_or_default();
        return refused(format!("its format is `{driver}`; raw and qcow2 can be moved"));
    }
    let described = inserted["file"].as_str().unwrap_or_default();
    if described.starts_with("json:") && disk.format == Some(Format::Raw) {
        return refused("it is only a part of its image".to_owned());
    }
    if image["format-specific"]["data"].get("data-file").is_some() {
        return refused("its data is in another file than its image (data-file)".to_owned());
    }
    // The destination's QEMU would have it as a backing file, too, and its content
    // would reappear where the guest has deleted something.
    let named = shape.nodes.iter().find(|node| disk.backing.contains(&node.file));
    if let Some(node) = named {
        return refused(format!(
            "its backing file is one of its command line's (node `{}`): give it an image without \
             backing file",
            node.name
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{Image, Node};

    fn shape(images: &[(&str, &str)], nodes: &[(&str, &str)]) -> Shape {
        let image = |(driver, file): &(&str, &str)| Image {
            driver: (*driver).to_owned(),
            file: (*file).to_owned(),
            read_only: false,
            bytes: 0,
        };
        let node = |(name, file): &(&str, &str)| Node {
            name: (*name).to_owned(),
            driver: "qcow2".to_owned(),
            file: (*file).to_owned(),
            read_only: true,
        };
        Shape {
            images: images.iter().map(image).collect(),
            nodes: nodes.iter().map(node).collect(),
            ..Shape::default()
        }
    }

    fn inserted(more: &Value) -> Value {
        let mut drive = json!({"device": "d0", "qdev": "/machine/peripheral/disk0/virtio-backend",
            "removable": false, "inserted": {"file": "a", "drv": "qcow2", "ro": false,
            "node-name": "#block1", "image": {"virtual-size": 9, "actual-size": 3,
            "cluster-size": 4096, "format-specific": {"data": {"compat": "0.10"}}}}});
        for (name, value) in more.as_object().unwrap() {
            drive["inserted"][name] = value.clone();
        }
        drive
    }

    #[test]
    fn a_disk_is_known_by_all_its_names() {
        let here = shape(&[("file", "a")], &[]);
        let found = disk(&inserted(&json!({"node-name": "n0"})), &here);
        assert_eq!((found.name.as_str(), found.node.as_str()), ("d0", "n0"));
        assert_eq!(found.other_names, ["disk0", "n0"]);
        assert_eq!(found.guest, "/machine/peripheral/disk0/virtio-backend");
        assert_eq!((found.bytes, found.allocated_bytes), (9, 3));
        let kept = Qcow2 { cluster_bytes: 4096, compat: "0.10".to_owned(), ..Qcow2::default() };
        assert_eq!(found.format, Some(Format::Qcow2(kept)));
        assert_eq!(found.stays, None);
    }

    #[test]
    fn an_image_needs_room_for_its_backing_files() {
        let base = |bytes: u64| json!({"filename": "base", "actual-size": bytes});
        let of = |own: u64, below: Value| {
            allocated(&json!({"virtual-size": 90, "actual-size": own, "backing-image": below}))
        };
        assert_eq!(of(2, base(40)), 42);
        assert_eq!(of(60, base(40)), 90, "some of it is covered");
        assert_eq!(of(2, json!({"actual-size": 3, "backing-image": base(40)})), 45);
        assert_eq!(allocated(&json!({"virtual-size": 90, "actual-size": 95})), 95);
        assert_eq!(allocated(&Value::Null), 0);
    }

    #[test]
    fn disks_that_stay_have_a_reason() {
        let whole = |file: &str| json!({"file": file, "drv": "raw"});
        let part = "json:{\"driver\": \"raw\", \"offset\": 512, \"file\": {\"driver\": \"file\", \
                    \"filename\": \"a\"}}";
        let backed = |file: &str| json!({"image": {"backing-image": {"filename": file}}});
        type Row = (Value, &'static str, bool, &'static str);
        let table: [Row; 8] = [
            (json!({"ro": true}), "file", true, "can't write"),
            (whole("a"), "rbd", true, "not an image of this host (rbd)"),
            (whole("a"), "vvfat", false, "protocol `vvfat`"),
            (json!({"drv": "vmdk"}), "file", false, "format is `vmdk`"),
            (json!({"encrypted": true}), "file", false, "encrypted"),
            (whole(part), "file", false, "part of its image"),
            (backed("base"), "file", false, "node `b`"),
            (
                json!({"image": {"format-specific": {"data": {"data-file": "d"}}}}),
                "file",
                false,
                "data-file",
            ),
        ];
        for (more, protocol, by_nature, expected) in table {
            let here = shape(&[(protocol, "a")], &[("b", "base")]);
            let stays = disk(&inserted(&more), &here).stays.unwrap();
            assert_eq!(matches!(stays, Stays::ByNature(_)), by_nature, "{more}");
            assert!(stays.reason().contains(expected), "{stays:?}");
        }
        let here = shape(&[("file", "a")], &[]);
        let found = disk(&inserted(&backed("base")), &here);
        assert_eq!(found.stays, None, "a backing file that the image names is no hindrance");
        assert_eq!(found.backing, ["base"]);
        assert_eq!(found.notes.len(), 1);
        let empty = json!({"device": "cd0", "removable": true});
        assert!(disk(&empty, &here).stays.unwrap().reason().contains("no medium"));
    }

    #[test]
    fn an_image_described_in_json_is_found() {
        let described = "json:{\"lazy-refcounts\": \"on\", \"driver\": \"qcow2\", \"file\": \
                         {\"driver\": \"host_device\", \"filename\": \"/dev/vg/a\"}}";
        let found = disk(&inserted(&json!({ "file": described })), &Shape::default());
        assert_eq!((found.protocol.as_str(), found.file.as_str()), ("host_device", "/dev/vg/a"));
        assert_eq!(found.stays, None);
        assert_eq!(bottom("json:nonsense", &Shape::default()).0, "");
    }
}
