//! Opens the disks of a VM that arrives, to read its pages from them.

use std::path::PathBuf;
use std::sync::Arc;

use data_threads::DataThreads;
use dedup::storage::Disks;
use host::rights::User;
use qemu::guest_disks::{GuestDisk, NbdServer, Reading};
use serde_json::Value;
use storage::{
    Endpoint, Image, Layer, NfsFile, Opened, Opening, Opens, Pace, Settings, begin_to_open,
};
use wire::StorageOrder;

use crate::host::Local;

/// More disks are not read: limits what an order can have this host open.
const DISKS_MAX: usize = 64;
/// Requests at a time to all disks of a VM: each has a thread, and a buffer of about 1 MiB.
const REQUESTS_MAX: usize = 64;
/// Why an image is not read.
const CACHED: &str = "its file system here has no direct reads, and what this host's page cache \
                      keeps of it may be old once the VM runs here";

/// The waiting QEMU.
pub(super) struct Waiting {
    /// Its disks, or why they aren't known.
    pub(super) disks: Result<Vec<GuestDisk>, String>,
    /// The user with whose rights their images are read; none means the agent's own.
    pub(super) user: Option<User>,
}

/// Opens the disks of an order, as the waiting QEMU has them. Returns for each that is not read why
/// not.
pub(super) fn open(
    waiting: Waiting,
    order: &StorageOrder,
    local: &Local,
    threads: &Arc<DataThreads>,
) -> (Disks, Vec<String>) {
    let mut notes = Vec::new();
    let here = waiting.disks.unwrap_or_else(|error| {
        notes.push(format!("no page is read from storage: {error}"));
        Vec::new()
    });
    let user = waiting.user.as_ref();
    let begun = |device: &String| {
        let disk = here.iter().find(|disk| disk.device == *device)?;
        Some((disk, begin(disk, local, user)))
    };
    // All at once: the migration waits for this, and storage that hangs may have all of them.
    let begun: Vec<_> = order.devices.iter().take(DISKS_MAX).map(begun).collect();
    let mut opened = |disk: &GuestDisk, opens: Result<Opens, String>| {
        let opened = opens.and_then(|opens| opens.wait().map_err(|error| error.to_string()));
        match opened.and_then(|opened| readable(opened, disk)) {
            Ok(opened) => {
                if opened.cached {
                    let file = &disk.file;
                    notes.push(format!(
                        "{file} is read through the destination's page cache: its file system has \
                         no direct reads"
                    ));
                }
                Some(opened)
            }
            Err(why) => {
                notes.push(format!("{} is not read: {why}", disk.file));
                None
            }
        }
    };
    let opened: Vec<Option<Opened>> = begun
        .into_iter()
        .map(|begun| begun.and_then(|(disk, opens)| opened(disk, opens)))
        .collect();
    let pace = Arc::new(Pace::default());
    pace.set(order.bytes_per_s);
    let in_flight = in_flight(opened.iter().flatten().count());
    let threads = Some(Arc::clone(threads));
    let settings = Settings { pace, in_flight, threads, ..Settings::default() };
    (Disks { opened, settings }, notes)
}

/// Requests at a time to each of so many disks.
fn in_flight(disks: usize) -> usize {
    (REQUESTS_MAX / disks.max(1)).clamp(1, Settings::default().in_flight)
}

/// Refuses an image that is read through this host's page cache, if the guest can write to it. Its
/// QEMU drops that cache when it takes the disk over, but no page that is being read: one that
/// storage gives late would be from before the VM's last writes, and the VM would read it here.
fn readable(opened: Opened, disk: &GuestDisk) -> Result<Opened, String> {
    if opened.cached && !disk.read_only { Err(CACHED.to_owned()) } else { Ok(opened) }
}

fn begin(disk: &GuestDisk, local: &Local, user: Option<&User>) -> Result<Opens, String> {
    let image = match &disk.reading {
        Reading::Direct { path, offset } => {
            Image::Raw { path: path.clone(), base: *offset, bytes: Some(disk.bytes) }
        }
        Reading::Nbd { server, export, offset: 0 } => {
            let endpoint = match server {
                NbdServer::Unix(path) => Endpoint::Unix(path.clone()),
                NbdServer::Tcp(address) => Endpoint::Tcp(address.clone()),
            };
            Image::Nbd { endpoint, export: export.clone() }
        }
        Reading::Nbd { .. } => return Err("it is only a part of an NBD export".to_owned()),
        Reading::ByQemuNbd { image } => match on_nfs(image) {
            Some(file) => Image::Nfs(file),
            None => of_a_format(image)?,
        },
        Reading::No { reason } => return Err(reason.clone()),
    };
    let mut how = Opening::new(&local.scratch);
    how.user = user.cloned();
    if let Image::Format(_) | Image::Nfs(_) = image {
        how.qemu_nbd = local.programs.tool("qemu-nbd", None).map_err(|error| error.to_string())?;
    }
    begin_to_open(&image, &how).map_err(|error| error.to_string())
}

/// An image on an NFS server. None if it is elsewhere, or not all that belongs to the disk.
fn on_nfs(image: &Value) -> Option<NfsFile> {
    /// Options by which the disk has other content than the file.
    const MORE: [&str; 4] = ["backing", "data-file", "offset", "size"];
    let given = |option: &str| image.get(option).is_some_and(|value| !value.is_null());
    let is_nfs = |node: &Value| node["driver"] == "nfs";
    let (format, file) = if is_nfs(image) {
        ("raw", image)
    } else if is_nfs(&image["file"]) && !MORE.into_iter().any(given) {
        (image["driver"].as_str()?, &image["file"])
    } else {
        return None;
    };
    Some(NfsFile {
        server: file["server"]["host"].as_str()?.to_owned(),
        path: file["path"].as_str()?.to_owned(),
        user: file["user"].as_u64(),
        group: file["group"].as_u64(),
        format: format.to_owned(),
    })
}

/// An image of a format, in a file, with the files that belong to it.
fn of_a_format(image: &Value) -> Result<Image, String> {
    if image["file"]["driver"] != "file" {
        return Err("it has a format, and is not in a file".to_owned());
    }
    let layer =
        layer(image).ok_or("its data file or a backing file is no file, or a part of one")?;
    Ok(Image::Format(layer))
}

/// An image in a file, as its QEMU has it. None if anything but all of a file belongs to it.
fn layer(image: &Value) -> Option<Layer> {
    let given = |option: &str| image.get(option).filter(|value| !value.is_null());
    if let Some(path) = file(image) {
        return Some(Layer::alone(path, "raw"));
    }
    if given("offset").is_some() || given("size").is_some() {
        return None;
    }
    let mut whole = Layer::alone(file(&image["file"])?, image["driver"].as_str()?);
    if let Some(below) = given("data-file") {
        whole.data_file = Some(file(below)?);
    }
    if let Some(below) = given("backing") {
        whole.backing = Some(Box::new(layer(below)?));
    }
    Some(whole)
}

/// The path of a file or a block device.
fn file(node: &Value) -> Option<PathBuf> {
    let is_one = matches!(node["driver"].as_str(), Some("file" | "host_device"));
    node["filename"].as_str().filter(|_| is_one).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use storage::FileSource;

    use super::*;

    fn in_file(driver: &str, name: &str) -> Value {
        json!({ "driver": driver, "filename": name })
    }

    fn qcow2(file: &Value, backing: &Value) -> Value {
        json!({ "driver": "qcow2", "file": file, "backing": backing, "read-only": true })
    }

    #[test]
    fn many_disks_share_the_requests() {
        let usual = Settings::default().in_flight;
        assert_eq!([0, 1, 4].map(in_flight), [usual; 3]);
        assert_eq!([5, 8, 64].map(in_flight), [12, 8, 1]);
    }

    #[test]
    fn an_image_that_this_host_caches_is_read_only_if_its_guest_can_not_write_to_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (cached, read_only, is_read) in
            [(false, false, true), (false, true, true), (true, false, false), (true, true, true)]
        {
            let source = FileSource::open(file.path(), 0, None).unwrap();
            let opened = Opened { source: Box::new(source), cached };
            let disk = GuestDisk {
                device: "/machine/peripheral/disk0".to_owned(),
                serial: String::new(),
                address: None,
                bytes: 0,
                node: "n".to_owned(),
                file: "/srv/a".to_owned(),
                read_only,
                reading: Reading::Direct { path: "/srv/a".into(), offset: 0 },
            };
            assert_eq!(readable(opened, &disk).is_ok(), is_read, "{cached} {read_only}");
        }
    }

    #[test]
    fn images_are_read_with_the_files_that_their_qemu_reads() {
        let base = qcow2(&in_file("host_device", "/dev/vg/b"), &in_file("file", "/srv/raw"));
        let mut top = qcow2(&in_file("file", "/srv/a"), &base);
        top["data-file"] = in_file("file", "/srv/data");
        let raw = Box::new(Layer::alone("/srv/raw".into(), "raw"));
        let base = Layer { backing: Some(raw), ..Layer::alone("/dev/vg/b".into(), "qcow2") };
        let expected = Layer {
            data_file: Some("/srv/data".into()),
            backing: Some(Box::new(base)),
            ..Layer::alone("/srv/a".into(), "qcow2")
        };
        assert_eq!(of_a_format(&top), Ok(Image::Format(expected)));
    }

    #[test]
    fn images_on_an_nfs_server_are_read_if_nothing_else_belongs_to_them() {
        let server = json!({ "type": "inet", "host": "store" });
        let nfs = json!({ "driver": "nfs", "server": server, "path": "/a", "group": 7 });
        let expected = |format: &str| {
            Some(NfsFile {
                server: "store".to_owned(),
                path: "/a".to_owned(),
                user: None,
                group: Some(7),
                format: format.to_owned(),
            })
        };
        assert_eq!(on_nfs(&nfs), expected("raw"));
        assert_eq!(on_nfs(&qcow2(&nfs, &Value::Null)), expected("qcow2"));
        let part = json!({ "driver": "raw", "offset": 512, "file": nfs });
        for other in [qcow2(&nfs, &in_file("file", "/b")), part, in_file("file", "/b")] {
            assert_eq!(on_nfs(&other), None, "{other}");
        }
    }

    #[test]
    fn images_of_which_a_part_is_no_file_are_not_read() {
        let file = in_file("file", "/srv/a");
        let part = json!({ "driver": "raw", "offset": 512, "file": file });
        let server = json!({ "type": "unix", "path": "/nbd" });
        let nbd = json!({ "driver": "nbd", "server": server, "export": "" });
        for other in [&in_file("rbd", "rbd:pool/a"), &nbd, &part] {
            let why = of_a_format(&qcow2(other, &Value::Null)).unwrap_err();
            assert!(why.contains("not in a file"), "{why}");
            let behind = qcow2(&in_file("file", "/srv/b"), other);
            let mut aside = qcow2(&file, &Value::Null);
            aside["data-file"] = other.clone();
            for image in [qcow2(&file, other), qcow2(&file, &behind), aside] {
                let why = of_a_format(&image).unwrap_err();
                assert!(why.contains("a backing file"), "{why}");
            }
        }
    }
}
