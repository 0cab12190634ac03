//! Finds out from sysfs whether a device is a virtio disk or a partition of one.

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
        // .../0000:00:03.0/virtio1/block/vda
        let virtio = disk.parent().filter(|block| block.ends_with("block"))?.parent()?;
        if !name(virtio)?.starts_with("virtio") || !is_block_driver(virtio) {
            return None;
        }
        let disk = Device {
            name: name(&disk)?,
            serial: read(&disk.join("serial")).unwrap_or_default(),
            address: virtio.parent().and_then(name)?,
            sectors: read_number(&disk.join("size"))?,
        };
        Some(Self { disk, first_sector })
    }
}

fn is_block_driver(virtio: &Path) -> bool {
    fs::read_link(virtio.join("driver")).is_ok_and(|driver| driver.ends_with("virtio_blk"))
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

    /// A sysfs with one disk, driven by `driver`, that has a partition.
    fn sysfs(driver: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let virtio = dir.path().join("devices/pci0000:00/0000:00:03.0/virtio1");
        let disk = virtio.join("block/vda");
        let part = disk.join("vda2");
        fs::create_dir_all(&part).unwrap();
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        symlink(format!("../../bus/drivers/{driver}"), virtio.join("driver")).unwrap();
        for (path, text) in [
            (disk.join("size"), "2048\n"),
            (disk.join("serial"), "data-1"),
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

    #[test]
    fn virtio_disks_and_their_parts_are_found() {
        let sysfs = sysfs("virtio_blk");
        let disk = Device {
            name: "vda".to_owned(),
            serial: "data-1".to_owned(),
            address: "0000:00:03.0".to_owned(),
            sectors: 2048,
        };
        let below = |minor| Extent::below(sysfs.path(), Number { major: 254, minor });
        assert_eq!(below(0), Some(Extent { disk: disk.clone(), first_sector: 0 }));
        assert_eq!(below(2), Some(Extent { disk, first_sector: 63 }));
        assert_eq!(below(3), None);
    }

    #[test]
    fn other_disks_are_left_alone() {
        let sysfs = sysfs("virtio_scsi");
        assert_eq!(Extent::below(sysfs.path(), Number { major: 254, minor: 0 }), None);
    }
}
