//! The disks on a command line, as far as their images are files that its QEMU has open.
//! Disks that were hot-plugged, and overlays that were added, are not seen: pages that are
//! read from an image are verified by their hash.

mod qcow2;

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::words::{Argument, Words};
use crate::guest_disks::{Attached, GuestDisk, Plugged, QemuAnswers, Unit};
use qcow2::Header;

/// Roles in which one node is below another.
const ROLES: [&str; 3] = ["file", "backing", "data-file"];
/// Those that an image's header fills if the command line doesn't.
const HEADER_ROLES: [&str; 2] = ["backing", "data-file"];
/// Options of a node that only say how it is used.
const USES: [&str; 10] = [
    "driver",
    "node-name",
    "read-only",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "cache",
    "aio",
    "force-share",
    "locking",
];
/// A deeper tree is a loop.
const DEPTH_MAX: u32 = 64;
/// The driver of what a header names and is not read here. No reader knows it. The name is not
/// shown: the image's maker may have chosen any.
const UNREAD: &str = "the file in its image's header";
/// The longest chain of images that headers name.
const HEADERS_MAX: u32 = DEPTH_MAX / 2;
const SECTOR_BYTES: u64 = 512;

/// The files that a process has open, by their names.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(BTreeMap<PathBuf, PathBuf>);

impl OpenFiles {
    pub(super) fn of(pid: u32) -> Self {
        let all = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let named = |one: fs::DirEntry| {
            let name = fs::read_link(one.path()).ok()?;
            name.is_absolute().then(|| (name, one.path()))
        };
        Self(all.filter_map(named).collect())
    }

    /// The file that it has open by this name.
    fn get(&self, name: &Path) -> Option<&PathBuf> {
        self.0.get(name)
    }

    /// Whether the file of this name on this host is the one that it has open by it.
    pub(super) fn has(&self, name: &Path) -> bool {
        let theirs = self.get(name).and_then(|open| fs::metadata(open).ok());
        let ours = fs::metadata(name).ok();
        let which = |data: &Metadata| (data.dev(), data.ino(), data.rdev());
        theirs.zip(ours).is_some_and(|(theirs, ours)| which(&theirs) == which(&ours))
    }
}

/// The disks of a QEMU whose relative paths start at `cwd`.
pub(super) fn of(words: Words<'_>, cwd: &Path, open: &OpenFiles) -> Vec<GuestDisk> {
    let mut nodes =
        Nodes { cwd, open, all: BTreeMap::new(), edges: Vec::new(), by_header: Vec::new() };
    for one in words.all("blockdev").filter_map(Argument::json) {
        nodes.add(one["node-name"].as_str().unwrap_or_default(), &one, 0);
    }
    for (id, node) in words.all("drive").filter_map(drive) {
        nodes.add(&id, &node, 0);
    }
    nodes.follow_headers();
    let sizes: Vec<(String, u64)> =
        nodes.all.keys().map(|name| (name.clone(), nodes.bytes(name, 0))).collect();
    let (devices, drives) = plugged(words);
    let (nodes, graph) = nodes.said(&sizes);
    let said = QemuAnswers { drives: drives.into(), nodes, graph, pci: bridges(words), devices };
    let mut disks = said.disks(cwd);
    // The buses' numbers are assumed; a serial number makes the address unnecessary.
    disks.iter_mut().filter(|disk| !disk.serial.is_empty()).for_each(|disk| disk.address = None);
    disks
}

/// Block nodes by name.
struct Nodes<'o> {
    cwd: &'o Path,
    open: &'o OpenFiles,
    all: BTreeMap<String, Map<String, Value>>,
    /// Parent, role, child.
    edges: Vec<(String, &'static str, String)>,
    /// Images with roles that their headers may fill, and how deep they are.
    by_header: Vec<(String, &'static str, u32)>,
}

impl Nodes<'_> {
    fn add(&mut self, name: &str, options: &Value, depth: u32) {
        let Some(mut options) = options.as_object().cloned() else { return };
        if name.is_empty() || depth > DEPTH_MAX {
            return;
        }
        if options.get("driver").and_then(Value::as_str) == Some("qcow2") {
            let left = HEADER_ROLES.into_iter().filter(|role| !options.contains_key(*role));
            self.by_header.extend(left.map(|role| (name.to_owned(), role, depth)));
        }
        for role in ROLES {
            match options.remove(role) {
                Some(Value::String(below)) => self.edges.push((name.to_owned(), role, below)),
                Some(below @ Value::Object(_)) => {
                    let own = below["node-name"].as_str().map(str::to_owned);
                    let own = own.unwrap_or_else(|| format!("{name}/{role}"));
                    self.add(&own, &below, depth + 1);
                    self.edges.push((name.to_owned(), role, own));
                }
                _ => {}
            }
        }
        self.all.insert(name.to_owned(), options);
    }

    /// Adds what the headers of images name, where QEMU follows them: whatever reads an image gets
    /// all of it named, and needs no header.
    fn follow_headers(&mut self) {
        while let Some((name, role, depth)) = self.by_header.pop() {
            let Some(below) = self.in_header(&name, role, depth) else { continue };
            let own = format!("{name}/{role}");
            self.add(&own, &below, depth + 1);
            self.edges.push((name, role, own));
        }
    }

    /// What an image's header names, as a node. None if it names nothing.
    fn in_header(&self, name: &str, role: &str, depth: u32) -> Option<Value> {
        let own = self.all.get(self.below(name)?)?.get("filename")?.as_str()?;
        let own = self.cwd.join(own);
        let file = self.open.get(&own)?;
        let unread = Some(json!({ "driver": UNREAD }));
        let Some(header) = Header::of(file).filter(|_| depth < HEADERS_MAX) else {
            return unread;
        };
        let (named, path, format) = if role == "data-file" {
            let named = header.data_file?;
            let path = self.cwd.join(&named);
            (named, path, None)
        } else {
            let (named, format) = header.backing?;
            let path = own.parent()?.join(&named);
            (named, path, Some(format))
        };
        // A name with a protocol in front is not a file.
        if named.split('/').next().unwrap_or_default().contains(':') {
            return unread;
        }
        let path = self.opened(path);
        let Some(text) = path.to_str() else { return unread };
        let file = json!({ "driver": "file", "filename": text });
        let Some(format) = format else { return Some(file) };
        let is_image = || self.open.get(&path).is_some_and(|it| Header::of(it).is_some());
        let format = format.unwrap_or_else(|| if is_image() { "qcow2" } else { "raw" }.to_owned());
        match format.as_str() {
            "raw" | "qcow2" => Some(json!({ "driver": format, "file": file })),
            _ => unread,
        }
    }

    /// The name by which QEMU has a file open, if it has.
    fn opened(&self, path: PathBuf) -> PathBuf {
        if self.open.get(&path).is_some() {
            return path;
        }
        let real = fs::canonicalize(&path).ok().filter(|real| self.open.get(real).is_some());
        real.unwrap_or(path)
    }

    fn below(&self, name: &str) -> Option<&str> {
        let is_it = |edge: &&(String, &str, String)| edge.0 == name && edge.1 == "file";
        self.edges.iter().find(is_it).map(|(_, _, child)| child.as_str())
    }

    fn file(&self, name: &str) -> Option<&PathBuf> {
        let named = self.all.get(name)?.get("filename")?.as_str()?;
        self.open.get(&self.cwd.join(named))
    }

    /// The size of a node; 0 if it isn't known.
    fn bytes(&self, name: &str, depth: u32) -> u64 {
        let Some(options) = self.all.get(name).filter(|_| depth < DEPTH_MAX) else { return 0 };
        let number = |key: &str| options.get(key).and_then(Value::as_u64);
        let below = || self.below(name).map_or(0, |below| self.bytes(below, depth + 1));
        match options.get("driver").and_then(Value::as_str).unwrap_or_default() {
            "file" | "host_device" => self.file(name).and_then(|file| length(file)).unwrap_or(0),
            "qcow2" => {
                self.below(name).and_then(|it| Header::of(self.file(it)?)).map_or(0, |it| it.bytes)
            }
            "raw" => {
                let offset = number("offset").unwrap_or(0);
                number("size").unwrap_or_else(|| below().saturating_sub(offset))
            }
            _ => below(),
        }
    }

    /// The nodes and their graph, in the form of QMP's answers.
    fn said(&self, sizes: &[(String, u64)]) -> (Value, Value) {
        let is_so = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
        let node = |(name, bytes): &(String, u64)| {
            let options = self.all.get(name)?;
            Some(json!({
                "node-name": name,
                "drv": options.get("driver"),
                "file": described(options),
                "image": { "virtual-size": bytes },
                "ro": is_so(options.get("read-only")),
                "encrypted": options.contains_key("encrypt"),
            }))
        };
        let nodes: Vec<Value> = sizes.iter().filter_map(node).collect();
        let number = |name: &str| sizes.iter().position(|(other, _)| other == name);
        let named = |(number, (name, _)): (usize, &(String, u64))| json!({ "id": number, "type": "block-driver", "name": name });
        let edge = |(parent, role, child): &(String, &str, String)| json!({ "parent": number(parent), "child": number(child), "name": role });
        let graph = json!({
            "nodes": sizes.iter().enumerate().map(named).collect::<Vec<_>>(),
            "edges": self.edges.iter().map(edge).collect::<Vec<_>>(),
        });
        (nodes.into(), graph)
    }
}

/// A node's image, as QEMU would name it.
fn described(options: &Map<String, Value>) -> String {
    if let Some(named) = options.get("filename").and_then(Value::as_str) {
        return named.to_owned();
    }
    let mut named = options.clone();
    named.retain(|key, _| !USES.contains(&key.as_str()));
    if named.is_empty() { String::new() } else { format!("json:{}", Value::Object(named)) }
}

fn length(file: &Path) -> Option<u64> {
    let data = fs::metadata(file).ok()?;
    if data.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(data.rdev()), rustix::fs::minor(data.rdev()));
        let sectors = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size")).ok()?;
        return sectors.trim().parse::<u64>().ok()?.checked_mul(SECTOR_BYTES);
    }
    Some(data.len())
}

/// A `-drive` without a device of its own, whose image is a file of a given format.
fn drive(one: Argument<'_>) -> Option<(String, Value)> {
    let (id, file, format) = (one.get("id")?, one.get("file")?, one.get("format")?);
    // A name with a protocol in front is not a file.
    let is_file = one.get("if").as_deref() == Some("none") && !file.contains(':');
    let node = json!({ "driver": format, "file": { "driver": "file", "filename": file } });
    is_file.then_some((id, node))
}

/// The disks of virtio devices, and the node of each.
fn plugged(words: Words<'_>) -> (Vec<Plugged>, Vec<Value>) {
    let (mut devices, mut drives) = (Vec::new(), Vec::new());
    for one in words.all("device") {
        let driver = one.get("driver").unwrap_or_default();
        let (Some(id), Some(drive)) = (one.get("id"), one.get("drive")) else { continue };
        let (attached, of_pci) = if driver.starts_with("virtio-blk") {
            (Attached::Blk, one)
        } else if driver == "scsi-hd"
            && let Some(controller) = one.get("bus").and_then(|bus| controller(words, &bus))
        {
            (Attached::Scsi(unit(one)), controller)
        } else {
            continue;
        };
        let bus = of_pci.get("bus").map(|bus| match bus.as_str() {
            "pci.0" | "pcie.0" => format!("/machine/{bus}"),
            bridge => format!("/machine/peripheral/{bridge}/{bridge}"),
        });
        let device = Plugged {
            path: format!("/machine/peripheral/{id}"),
            serial: one.get("serial").unwrap_or_default(),
            attached,
            devfn: of_pci.get("addr").as_deref().and_then(devfn),
            bus: bus.unwrap_or_default(),
        };
        drives.push(json!({ "qdev": device.user(), "inserted": { "node-name": drive } }));
        devices.push(device);
    }
    (devices, drives)
}

/// The virtio-scsi controller to which a SCSI bus belongs.
fn controller<'a>(words: Words<'a>, bus: &str) -> Option<Argument<'a>> {
    let owner = bus.strip_suffix(".0")?;
    words.all("device").find(|one| {
        one.get("driver").is_some_and(|driver| driver.starts_with("virtio-scsi"))
            && one.get("id").as_deref() == Some(owner)
    })
}

/// A disk's unit. None if QEMU chooses it.
fn unit(one: Argument<'_>) -> Option<Unit> {
    let number = |key: &str| one.get(key)?.parse::<u64>().ok();
    let channel = if one.get("channel").is_some() { number("channel")? } else { 0 };
    Some(Unit { channel, target: number("scsi-id")?, lun: number("lun")? })
}

/// The bridges of the first bus, with the numbers that firmware gives to the buses behind
/// them: consecutive, if none has another bridge behind it.
fn bridges(words: Words<'_>) -> Value {
    let is_bridge = |one: &Argument<'_>| {
        let driver = one.get("driver").unwrap_or_default();
        driver == "pcie-root-port" || driver == "ioh3420"
    };
    let mut bridges: Vec<(u64, String)> = words
        .all("device")
        .filter(is_bridge)
        .filter(|one| one.get("bus").is_none_or(|bus| bus == "pcie.0"))
        .filter_map(|one| Some((devfn(&one.get("addr")?)?, one.get("id")?)))
        .collect();
    bridges.sort();
    let bridge = |(number, (_, id)): (u32, &(u64, String))| json!({ "qdev_id": id, "pci_bridge": { "bus": { "secondary": number } } });
    json!([{ "devices": (1..).zip(&bridges).map(bridge).collect::<Vec<_>>() }])
}

/// Slot and function of `0x2.0x1`.
fn devfn(address: &str) -> Option<u64> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    let (slot, function) = address.split_once('.').unwrap_or((address, "0"));
    let (slot, function) = (number(slot)?, number(function)?);
    (slot < 32 && function < 8).then_some(slot << 3 | function)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::guest_disks::Reading;

    /// Disks as on the command lines of libvirt 9.0, and of people.
    fn line(dir: &Path) -> Vec<String> {
        let at = |name: &str| dir.join(name).display().to_string();
        let json = |value: Value| value.to_string();
        let mut words = vec!["qemu-system-x86_64".to_owned()];
        let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
        for (port, addr) in [("pci.1", "0x2"), ("pci.2", "0x2.0x1"), ("pci.3", "0x3")] {
            let port = json!({ "driver": "pcie-root-port", "id": port, "bus": "pcie.0",
                "addr": addr });
            add("-device", json(port));
        }
        add(
            "-blockdev",
            json(json!({ "driver": "file", "filename": at("base.qcow2"),
            "node-name": "libvirt-3-storage", "auto-read-only": true, "discard": "unmap" })),
        );
        add(
            "-blockdev",
            json(json!({ "node-name": "libvirt-3-format", "read-only": true,
            "driver": "qcow2", "file": "libvirt-3-storage", "backing": null })),
        );
        add(
            "-blockdev",
            json(json!({ "driver": "file", "filename": at("a.qcow2"),
            "node-name": "libvirt-2-storage", "cache": { "direct": true } })),
        );
        add(
            "-blockdev",
            json(json!({ "node-name": "libvirt-2-format", "read-only": false,
            "cache": { "direct": true }, "driver": "qcow2", "file": "libvirt-2-storage",
            "backing": "libvirt-3-format" })),
        );
        add(
            "-device",
            json(json!({ "driver": "virtio-blk-pci", "bus": "pci.2", "addr": "0x0",
            "drive": "libvirt-2-format", "id": "virtio-disk0" })),
        );
        add(
            "-blockdev",
            json(json!({ "driver": "raw", "node-name": "b", "offset": 512,
            "file": { "driver": "file", "filename": "b.raw" } })),
        );
        add("-device", "virtio-blk-pci,drive=b,id=virtio-disk1,serial=files-b".to_owned());
        add(
            "-blockdev",
            json(json!({ "driver": "nbd", "node-name": "n", "export": "x",
            "server": { "type": "unix", "path": "/run/nbd" }, "read-only": false })),
        );
        add("-device", "virtio-blk-pci,drive=n,id=virtio-disk2,bus=pcie.0,addr=0x5".to_owned());
        add("-blockdev", json(json!({ "driver": "file", "filename": "gone", "node-name": "g" })));
        add("-device", "virtio-blk-pci,drive=g,id=virtio-disk3,serial=g".to_owned());
        add("-drive", format!("file={},format=qcow2,if=none,id=d", at("base.qcow2")));
        add("-device", "virtio-blk-pci,drive=d,id=virtio-disk4,serial=d".to_owned());
        add("-drive", "file=rbd:pool/a,format=raw,if=none,id=r".to_owned());
        add("-device", "virtio-blk-pci,drive=r,id=virtio-disk5".to_owned());
        let controller = json!({ "driver": "virtio-scsi-pci", "id": "scsi0", "bus": "pci.3",
            "addr": "0x0" });
        add("-device", json(controller));
        add(
            "-device",
            json(json!({ "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": 1,
            "lun": 0, "device_id": "drive-scsi0-0-1-0", "drive": "libvirt-3-format",
            "id": "scsi0-0-1-0" })),
        );
        let long = format!("{}-which-the-guest-does-not-see", "x".repeat(36));
        add("-device", format!("scsi-hd,bus=scsi0.0,drive=b,id=scsi0-0-2-0,serial={long}"));
        // Not visible to the guest's helper.
        add("-device", "lsi,id=scsi1,bus=pcie.0,addr=0x7".to_owned());
        add("-device", "scsi-hd,bus=scsi1.0,scsi-id=0,lun=0,drive=b,id=scsi1-0-0-0".to_owned());
        words
    }

    fn qcow2(bytes: u64) -> Vec<u8> {
        let mut header = vec![0; 512];
        header[..4].copy_from_slice(&qcow2::MAGIC);
        header[24..32].copy_from_slice(&bytes.to_be_bytes());
        header
    }

    #[test]
    fn disks_are_those_whose_images_are_open() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("base.qcow2"), qcow2(9 << 20)).unwrap();
        fs::write(at("a.qcow2"), qcow2(10 << 20)).unwrap();
        fs::write(at("b.raw"), vec![0; 4608]).unwrap();
        let _open = ["base.qcow2", "a.qcow2", "b.raw"].map(|name| File::open(at(name)).unwrap());
        let open = OpenFiles::of(std::process::id());
        let words = line(dir.path());
        let disks = of(Words(&words), dir.path(), &open);
        let seen = "x".repeat(36);
        let shown = disks.iter().map(|disk| {
            let device = disk.device.strip_prefix("/machine/peripheral/").unwrap();
            (device, disk.serial.as_str(), disk.address.as_deref(), disk.bytes)
        });
        let expected = [
            ("virtio-disk0", "", Some("0000:02:00.0"), 10 << 20),
            ("virtio-disk1", "files-b", None, 4096),
            ("virtio-disk2", "", Some("0000:00:05.0"), 0),
            ("virtio-disk3", "g", None, 0),
            ("virtio-disk4", "d", None, 9 << 20),
            ("scsi0-0-1-0", "", Some("0000:03:00.0/0:1:0"), 9 << 20),
            ("scsi0-0-2-0", seen.as_str(), None, 4096),
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        let Reading::ByQemuNbd { image } = &disks[0].reading else { panic!("{disks:#?}") };
        assert_eq!(image["file"]["filename"], at("a.qcow2").display().to_string());
        assert_eq!(image["backing"]["driver"], "qcow2", "{image}");
        let direct = Reading::Direct { path: at("b.raw"), offset: 512 };
        assert_eq!(disks[1].reading, direct);
        assert!(matches!(&disks[2].reading, Reading::Nbd { export, .. } if export == "x"));
        // By name alone it could be any file of the host.
        assert!(open.has(&at("a.qcow2")) && !open.has(&at("gone")));
        fs::rename(at("b.raw"), at("a.qcow2")).unwrap();
        assert!(!open.has(&at("a.qcow2")), "another file has the name now");
    }

    #[test]
    fn headers_name_backing_files_where_the_command_line_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("base"), qcow2::header("", "", "")).unwrap();
        let mut open = vec![File::open(at("base")).unwrap()];
        let mut reading = |backing: &str, format: &str, more: &str| {
            fs::write(at("sub/top"), qcow2::header(backing, format, "")).unwrap();
            open.push(File::open(at("sub/top")).unwrap());
            let file = json!({ "driver": "file", "filename": at("sub/top") });
            let mut node = json!({ "driver": "qcow2", "node-name": "top", "file": file });
            if !more.is_empty() {
                node[more] = Value::Null;
            }
            let device = "virtio-blk-pci,drive=top,id=disk";
            let words = ["-blockdev", &node.to_string(), "-device", device].map(str::to_owned);
            let open = OpenFiles::of(std::process::id());
            of(Words(&words), dir.path(), &open).remove(0).reading
        };
        let base = |driver: &str, name: &str| {
            let file = json!({ "driver": "file", "filename": at(name) });
            let mut base = json!({ "driver": driver, "file": file });
            if driver == "qcow2" {
                base["backing"] = Value::Null;
            }
            base
        };
        let image = |reading: Reading| match reading {
            Reading::ByQemuNbd { image } => image["backing"].clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(image(reading("../base", "qcow2", "")), base("qcow2", "base"));
        // QEMU looks what it is.
        assert_eq!(image(reading("../base", "", "")), base("qcow2", "base"));
        assert_eq!(image(reading("../base", "raw", "")), base("raw", "base")["file"]);
        // The caller refuses what is not open.
        assert_eq!(image(reading("gone", "raw", "")), base("raw", "sub/gone")["file"]);
        assert_eq!(image(reading("", "", "")), Value::Null);
        assert_eq!(image(reading("../base", "qcow2", "backing")), Value::Null);
        for (backing, format) in [("json:{}", "raw"), ("../base", "vmdk"), ("top", "qcow2")] {
            let reading = reading(backing, format, "");
            assert!(matches!(reading, Reading::No { .. }), "{reading:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_words_are_a_command_line(words: Vec<String>, more in ".*") {
            let mut words = words;
            for option in ["-blockdev", "-device", "-object", "-numa", "-m", "-machine"] {
                words.extend([option.to_owned(), more.clone()]);
            }
            let _ = of(Words(&words), Path::new("/srv"), &OpenFiles::default());
            let _ = super::super::memory::of(Words(&words));
        }
    }
}
