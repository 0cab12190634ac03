//! Opens the disks of a VM that arrives, to read its pages from them.

use std::sync::Arc;

use data_threads::DataThreads;
use dedup::storage::Disks;
use qemu::guest_disks::{GuestDisk, NbdServer, Reading};
use rights::User;
use storage::{Endpoint, Image, Opened, Opening, Pace, Settings};
use wire::StorageOrder;

use crate::host::Local;

/// More disks are not read: limits what an order can have this host open.
const DISKS_MAX: usize = 64;

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
    let mut open = |device: &String| {
        let disk = here.iter().find(|disk| disk.device == *device)?;
        match open_one(disk, local, waiting.user.as_ref()) {
            Ok(opened) => {
                if opened.cached {
                    let file = &disk.file;
                    notes.push(format!("{file} is read through the destination's page cache: its file system does not do otherwise"));
                }
                Some(opened)
            }
            Err(why) => {
                notes.push(format!("{} is not read: {why}", disk.file));
                None
            }
        }
    };
    let opened: Vec<Option<Opened>> = order.devices.iter().take(DISKS_MAX).map(&mut open).collect();
    let pace = Arc::new(Pace::default());
    pace.set(order.bytes_per_s);
    let settings = Settings { pace, threads: Some(Arc::clone(threads)), ..Settings::default() };
    (Disks { opened, settings }, notes)
}

fn open_one(disk: &GuestDisk, local: &Local, user: Option<&User>) -> Result<Opened, String> {
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
        Reading::ByQemuNbd { image } => of_a_format(image)?,
        Reading::No { reason } => return Err(reason.clone()),
    };
    let mut how = Opening::new(&local.scratch);
    how.user = user.cloned();
    if let Image::Format { .. } = image {
        how.qemu_nbd = local.programs.tool("qemu-nbd", None).map_err(|error| error.to_string())?;
    }
    storage::open(&image, &how).map_err(|error| error.to_string())
}

/// An image of a format, in a file.
fn of_a_format(image: &serde_json::Value) -> Result<Image, String> {
    let (format, file) = (image["driver"].as_str(), &image["file"]);
    let path = file["filename"].as_str().filter(|_| file["driver"] == "file");
    match (format, path) {
        (Some(format), Some(path)) => {
            Ok(Image::Format { path: path.into(), format: format.to_owned() })
        }
        _ => Err("it is in a format, and not in a file".to_owned()),
    }
}
