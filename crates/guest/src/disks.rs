//! Finds out from sysfs and the device mapper which virtio disks, of virtio-blk or virtio-scsi, are
//! below a device: a disk, a partition of one, or a linear volume of LVM.

use std::fs;
use std::path::{Path, PathBuf};

use cachemap::{Device, Reason};

use crate::mapper::Linear;
use crate::mounts::Number;

/// Volumes on volumes: a deeper stack is not resolved.
const DEPTH_MAX: u32 = 8;
/// Nor is one that consists of more parts.
const SEGMENTS_MAX: usize = 4096;

/// A part of a device that is contiguous on a virtio disk, in sectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its first sector on the device.
    pub(crate) start: u64,
    pub(crate) sectors: u64,
    pub(crate) disk: Device,
    /// Its first sector on the disk.
    pub(crate) first_sector: u64,
}

/// Finds the disks below devices.
pub(crate) struct Resolver<'a> {
    pub(crate) sysfs: &'a Path,
    /// The parts of a mapped device, if all are linear.
    pub(crate) table: &'a dyn Fn(Number) -> Option<Vec<Linear>>,
}

impl Resolver<'_> {
    /// All of the device with this number, in order, or why its file system is left out. With
    /// anything else in between (RAID, encryption, snapshots), a file's blocks are not where the
    /// file system says.
    pub(crate) fn segments(&self, number: Number) -> Result<Vec<Segment>, Reason> {
        self.at_depth(number, 0)
    }

    fn at_depth(&self, number: Number, depth: u32) -> Result<Vec<Segment>, Reason> {
        let link = self.sysfs.join(format!("dev/block/{}:{}", number.major, number.minor));
        let path = fs::canonicalize(link).map_err(|_| Reason::FileSystem)?;
        if !path.join("dm").is_dir() {
            return straight(path).map(|segment| vec![segment]).ok_or(Reason::FileSystem);
        }
        let table = if depth < DEPTH_MAX { (self.table)(number) } else { None };
        self.below(&table.ok_or(Reason::Mapping)?, depth)
    }

    /// The same of what consists of these parts.
    pub(crate) fn of_parts(&self, parts: &[Linear]) -> Result<Vec<Segment>, Reason> {
        self.below(parts, 0)
    }

    fn below(&self, parts: &[Linear], depth: u32) -> Result<Vec<Segment>, Reason> {
        let mut segments = Vec::new();
        // Most are on one device.
        for parts in parts.chunk_by(|one, next| one.on == next.on) {
            let Some(first) = parts.first() else { continue };
            let below = self.at_depth(first.on, depth + 1)?;
            for part in parts {
                segments.extend(below.iter().filter_map(|segment| common(part, segment)));
                if segments.len() > SEGMENTS_MAX {
                    return Err(Reason::Mapping);
                }
            }
        }
        Ok(segments)
    }
}

/// A virtio disk, or a partition of one.
fn straight(path: PathBuf) -> Option<Segment> {
    let sectors = read_number(&path.join("size"))?;
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
    Some(Segment { start: 0, sectors, disk, first_sector })
}

/// What a part of a mapped device has of a segment of the device below it.
fn common(part: &Linear, segment: &Segment) -> Option<Segment> {
    let start = part.first_sector.max(segment.start);
    let end = |first: u64, sectors| first.saturating_add(sectors);
    let end = end(part.first_sector, part.sectors).min(end(segment.start, segment.sectors));
    (start < end).then(|| Segment {
        start: part.start + (start - part.first_sector),
        sectors: end - start,
        disk: segment.disk.clone(),
        first_sector: segment.first_sector + (start - segment.start),
    })
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

    /// The disk that is all of the device with this number, and the device's first sector on it.
    fn below(sysfs: &tempfile::TempDir, minor: u32) -> Option<(Device, u64)> {
        let resolver = Resolver { sysfs: sysfs.path(), table: &|_| None };
        let mut segments = resolver.segments(number(minor)).ok()?;
        let Segment { start, sectors, disk, first_sector } = segments.remove(0);
        let size = if minor == 0 { disk.sectors } else { 1000 };
        assert_eq!((segments.len(), start, sectors), (0, 0, size));
        Some((disk, first_sector))
    }

    fn number(minor: u32) -> Number {
        Number { major: 254, minor }
    }

    fn disk(name: &str, serial: &str, address: &str) -> Device {
        let [name, serial, address] = [name, serial, address].map(str::to_owned);
        Device { name, serial, address, sectors: 2048 }
    }

    #[test]
    fn virtio_disks_and_their_parts_are_found() {
        let sysfs = sysfs("virtio_blk", "block/vda");
        let at = sysfs.path().join("dev/block/254:0");
        let found =
            |serial, first_sector| Some((disk("vda", serial, "0000:00:03.0"), first_sector));
        assert_eq!(below(&sysfs, 0), found("", 0));
        fs::write(at.join("serial"), "data-1").unwrap();
        assert_eq!(below(&sysfs, 0), found("data-1", 0));
        assert_eq!(below(&sysfs, 2), found("data-1", 63));
        assert_eq!(below(&sysfs, 3), None);
    }

    #[test]
    fn disks_of_a_virtio_scsi_controller_are_found_with_their_unit() {
        let device = "host0/target0:0:3/0:0:3:1";
        let sysfs = sysfs("virtio_scsi", &format!("{device}/block/sda"));
        let virtio = sysfs.path().join("devices/pci0000:00/0000:00:03.0/virtio1");
        let found =
            |serial, first_sector| Some((disk("sda", serial, "0000:00:03.0/0:3:1"), first_sector));
        assert_eq!(below(&sysfs, 0), found("", 0));
        for (page, serial) in [
            // As QEMU's `scsi-hd,serial=data-2` has it.
            (&b"\0\x80\0\x06data-2"[..], "data-2"),
            (b"\0\x80\0\x08 data-2 ", "data-2"),
            (b"\0\x80\0\x07data-2", ""),
            (b"\0\x80\0", ""),
        ] {
            fs::write(virtio.join(device).join("vpd_pg80"), page).unwrap();
            assert_eq!(below(&sysfs, 2), found(serial, 63), "{page:?}");
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

    /// Has a device mapped to others, as sysfs shows it.
    fn map(sysfs: &tempfile::TempDir, minor: u32) {
        let device = sysfs.path().join(format!("devices/virtual/block/dm-{minor}"));
        fs::create_dir_all(device.join("dm")).unwrap();
        symlink(&device, sysfs.path().join(format!("dev/block/254:{minor}"))).unwrap();
    }

    #[test]
    fn linear_volumes_are_followed_to_their_disks() {
        let sysfs = sysfs("virtio_blk", "block/vda");
        (8..12).for_each(|minor| map(&sysfs, minor));
        let part = |start, sectors, minor, first_sector| {
            let on = Number { major: 254, minor };
            Linear { start, sectors, on, first_sector }
        };
        let table = |device: Number| match device.minor {
            // A volume in two pieces on a partition, and one that spans them.
            8 => Some(vec![part(0, 100, 2, 384), part(100, 50, 2, 8)]),
            9 => Some(vec![part(0, 60, 8, 90)]),
            // Itself.
            10 => Some(vec![part(0, 60, 10, 0)]),
            _ => None,
        };
        let resolver = Resolver { sysfs: sysfs.path(), table: &table };
        let shown = |minor| {
            let segments = resolver.segments(number(minor))?;
            let each = segments.iter().map(|one| (one.start, one.sectors, one.first_sector));
            Ok::<Vec<_>, Reason>(each.collect())
        };
        assert_eq!(shown(8), Ok(vec![(0, 100, 63 + 384), (100, 50, 63 + 8)]));
        assert_eq!(shown(9), Ok(vec![(0, 10, 63 + 384 + 90), (10, 50, 63 + 8)]));
        assert_eq!(shown(10), Err(Reason::Mapping), "a loop");
        assert_eq!(shown(11), Err(Reason::Mapping), "not linear");
        assert_eq!(shown(12), Err(Reason::FileSystem), "no device");
    }
}
