//! Finds out from sysfs whether a device is a virtio disk, of virtio-blk or virtio-scsi, or a
//! partition of one.

use std::fs;
use std::path::{Path, PathBuf};

use cachemap::Device;

use crate::mounts::Number;

/// The disk below a file system, and the file system's first sector on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) disk: Device,
    pub(crate) first_sector: u64,
}

impl Extent {
    /// The virtio disk directly below the device with this number, if there is one. With anything
    /// in between (LVM, RAID, encryption), a file's blocks are not where the file system says.
    pub(crate) fn below(sysfs: &Path, number: Number) -> Option<Self> {
        let link = sysfs.join(format!("dev/block/{}:{}", number.major, number.minor));
        let path = fs::canonicalize(link).ok()?;
        let is_part = path.join("partition").is_file();
        let first_sector = if is_part { read_number(&path.join("start"))? } else { 0 };
        let disk = if is_part { path.parent()?.to_path_buf() } else { path };
        let (serial, address) = identity(&disk)?;
        let disk = Device {
            name: name(&disk)?,
            serial: serial.unwrap_or_default(),
            address,
            sectors: read_number(&disk.join("size"))?,
        };
        Some(Self { disk, first_sector })
    }
}

/// The serial number of a virtio disk, if it has one, and its address: that of its PCI device, with
/// channel, target and LUN if that is a SCSI controller.
fn identity(disk: &Path) -> Option<(Option<String>, String)> {
    let device = disk.parent().filter(|block| block.ends_with("block"))?.parent()?;
    // .../0000:00:03.0/virtio1/block/vda
    if is_virtio(device, "virtio_blk") {
        return Some((read(&disk.join("serial")), device.parent().and_then(name)?));
    }
    // .../0000:00:04.0/virtio2/host0/target0:0:1/0:0:1:0/block/sda
    let virtio = device.ancestors().nth(3).filter(|virtio| is_virtio(virtio, "virtio_scsi"))?;
    let numbers = name(device)?;
    let (_host, unit) = numbers.split_once(':')?;
    let address = format!("{}/{unit}", virtio.parent().and_then(name)?);
    let page = fs::read(device.join("vpd_pg80")).ok();
    Some((page.as_deref().and_then(serial_in), address))
}

/// The serial number in a SCSI disk's page of vital product data.
fn serial_in(page: &[u8]) -> Option<String> {
    let [_, _, high, low, rest @ ..] = page else { return None };
    let text = rest.get(..usize::from(u16::from_be_bytes([*high, *low])))?;
    Some(String::from_utf8_lossy(text).trim().to_owned())
}

fn is_virtio(device: &Path, driver: &str) -> bool {
    name(device).is_some_and(|name| name.starts_with("virtio"))
        && fs::read_link(device.join("driver")).is_ok_and(|its| its.ends_with(driver))
}

fn name(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}

fn read(path: &PathBuf) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn read_number(path: &PathBuf) -> Option<u64> {
    read(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A disk with a partition, at `disk` below a virtio device of this driver.
    fn sysfs(driver: &str, disk: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let virtio = dir.path().join("devices/pci0000:00/0000:00:03.0/virtio1");
        let disk = virtio.join(disk);
        let part = disk.join("part2");
        fs::create_dir_all(&part).unwrap();
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        symlink(format!("../../bus/drivers/{driver}"), virtio.join("driver")).unwrap();
        for (path, text) in [
            (disk.join("size"), "2048\n"),
            (part.join("partition"), "2\n"),
            (part.join("start"), "63\n"),
            (part.join("size"), "1000\n"),
        ] {
            fs::write(path, text).unwrap();
        }
        for (number, path) in [("254:0", &disk), ("254:2", &part)] {
            symlink(path, dir.path().join("dev/block").join(number)).unwrap();
        }
        dir
    }

    fn below(sysfs: &tempfile::TempDir, minor: u32) -> Option<Extent> {
        Extent::below(sysfs.path(), Number { major: 254, minor })
    }

    fn disk(name: &str, serial: &str, address: &str) -> Device {
        let [name, serial, address] = [name, serial, address].map(str::to_owned);
        Device { name, serial, address, sectors: 2048 }
    }

    #[test]
    fn virtio_disks_and_their_parts_are_found() {
        let sysfs = sysfs("virtio_blk", "block/vda");
        let at = sysfs.path().join("dev/block/254:0");
        let extent = |serial, first_sector| {
            Some(Extent { disk: disk("vda", serial, "0000:00:03.0"), first_sector })
        };
        assert_eq!(below(&sysfs, 0), extent("", 0));
        fs::write(at.join("serial"), "data-1").unwrap();
        assert_eq!(below(&sysfs, 0), extent("data-1", 0));
        assert_eq!(below(&sysfs, 2), extent("data-1", 63));
        assert_eq!(below(&sysfs, 3), None);
    }

    #[test]
    fn disks_of_a_virtio_scsi_controller_are_found_with_their_unit() {
        let device = "host0/target0:0:3/0:0:3:1";
        let sysfs = sysfs("virtio_scsi", &format!("{device}/block/sda"));
        let virtio = sysfs.path().join("devices/pci0000:00/0000:00:03.0/virtio1");
        let extent = |serial, first_sector| {
            Some(Extent { disk: disk("sda", serial, "0000:00:03.0/0:3:1"), first_sector })
        };
        assert_eq!(below(&sysfs, 0), extent("", 0));
        for (page, serial) in [
            // As QEMU's `scsi-hd,serial=data-2` has it.
            (&b"\0\x80\0\x06data-2"[..], "data-2"),
            (b"\0\x80\0\x08 data-2 ", "data-2"),
            (b"\0\x80\0\x07data-2", ""),
            (b"\0\x80\0", ""),
        ] {
            fs::write(virtio.join(device).join("vpd_pg80"), page).unwrap();
            assert_eq!(below(&sysfs, 2), extent(serial, 63), "{page:?}");
        }
    }

    #[test]
    fn other_disks_are_left_alone() {
        for (driver, at) in [
            ("virtio_scsi", "block/vda"),
            ("virtio_blk", "host0/target0:0:3/0:0:3:1/block/sda"),
            ("virtio_scsi", "host0/0:0:3:1/block/sda"),
        ] {
            assert_eq!(below(&sysfs(driver, at), 0), None, "{driver} {at}");
        }
    }
}
