//! The identity that a block device has at every host that sees it.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

/// How names start that are made of an ATA disk's model and serial number alone. No two hosts see
/// one such disk, and virtual ones of different hosts have the same names.
const LOCAL_NAMES: [&str; 2] = ["t10.ATA ", "mpath-1ATA"];

const LVM: &str = "LVM-";
const MULTIPATH: &str = "mpath-";
/// Between a disk's identity and the number of its partition.
const PARTITION: &str = " part ";
/// How the identities of NVMe namespaces start, which multipath devices keep.
const NVME: [&str; 3] = ["eui.", "uuid.", "nvme."];

/// Whether disks of different hosts may have this identity.
pub(super) fn is_local_name(identity: &str) -> bool {
    LOCAL_NAMES.iter().any(|name| identity.starts_with(name))
}

/// An identity that may be compared with another.
#[derive(Debug)]
pub(super) struct Device<'i> {
    /// That of the disk, as the kernel's SCSI and NVMe drivers have it, where possible.
    pub(super) identity: Cow<'i, str>,
    /// `None` for the disk itself.
    pub(super) partition: Option<&'i str>,
}

impl<'i> Device<'i> {
    pub(super) fn of(identity: &'i str) -> Self {
        match identity.split_once(PARTITION) {
            Some((disk, number)) => Self { identity: without_paths(disk), partition: Some(number) },
            None => Self { identity: without_paths(identity), partition: None },
        }
    }

    /// The prefix of all identities by which two such devices can be distinguished; `None` if there
    /// are none: a layer of a logical volume (`-real`, `-tpool`) may have others on it.
    pub(super) fn kind(&self) -> Option<&str> {
        let identity = &*self.identity;
        if let Some(volume) = identity.strip_prefix(LVM) {
            return (!volume.contains('-')).then_some(LVM);
        }
        if identity.starts_with(MULTIPATH) {
            return identity.get(..=MULTIPATH.len());
        }
        identity.split_once('.').map(|(kind, _)| kind)
    }
}

/// The identity of a multipath device's disk, if it says which that is.
fn without_paths(identity: &str) -> Cow<'_, str> {
    let Some(disk) = identity.strip_prefix(MULTIPATH) else { return identity.into() };
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match disk.split_at_checked(1) {
        _ if NVME.iter().any(|kind| disk.starts_with(kind)) => disk.into(),
        // As udev's scsi_id numbers the types of SCSI designators.
        Some(("3", number)) if is_hex(number) => format!("naa.{number}").into(),
        Some(("2", number)) if is_hex(number) => format!("eui.{number}").into(),
        _ => identity.into(),
    }
}

/// The name that hardware or the volume manager gives the device of this number.
pub(super) fn identity(number: u64) -> Result<String, String> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    identity_in(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
}

fn identity_in(folder: &Path) -> Result<String, String> {
    let folder = folder.canonicalize().map_err(|error| format!("it is not in sysfs: {error}"))?;
    if let Some(number) = attribute(&folder, "partition") {
        let disk = folder.parent().ok_or("its disk is not in sysfs")?;
        return Ok(format!("{}{PARTITION}{number}", whole(disk)?));
    }
    whole(&folder)
}

fn whole(folder: &Path) -> Result<String, String> {
    // LVM volumes and multipath devices carry the identity of the underlying
    // storage; other device-mapper names are local to a host.
    if let Some(uuid) = attribute(folder, "dm/uuid") {
        if uuid.starts_with(LVM) || uuid.starts_with(MULTIPATH) {
            return Ok(uuid);
        }
        return Err("its device-mapper target has no identity that other hosts know".to_owned());
    }
    attribute(folder, "wwid")
        .or_else(|| attribute(folder, "device/wwid"))
        .ok_or_else(|| "the block device has no world-wide name".to_owned())
}

fn attribute(folder: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(folder.join(name)).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn only_names_that_other_hosts_see_are_identities() {
        let dir = sysfs(&[
            ("sda/device/wwid", "naa.5000c500a1b2c3d4\n"),
            ("sda/sda2/partition", "2\n"),
            ("nvme0n1/wwid", "eui.0025388b710116a1\n"),
            ("dm-0/dm/uuid", "LVM-abcdef\n"),
            ("dm-1/dm/uuid", "CRYPT-LUKS2-abc\n"),
            ("loop0/size", "8\n"),
        ]);
        let of = |name: &str| identity_in(&dir.path().join(name));
        assert_eq!(of("sda").unwrap(), "naa.5000c500a1b2c3d4");
        assert_eq!(of("sda/sda2").unwrap(), "naa.5000c500a1b2c3d4 part 2");
        assert_eq!(of("nvme0n1").unwrap(), "eui.0025388b710116a1");
        assert_eq!(of("dm-0").unwrap(), "LVM-abcdef");
        assert!(of("dm-1").is_err());
        assert!(of("loop0").is_err());
        assert!(of("nothing").is_err());
    }

    #[test]
    fn a_name_made_of_model_and_serial_number_is_no_proof() {
        let dir = sysfs(&[
            ("sda/device/wwid", "t10.ATA     QEMU HARDDISK                           QM00005\n"),
            ("sda/sda1/partition", "1\n"),
            ("sdb/device/wwid", "naa.5000c500a1b2c3d4\n"),
        ]);
        for (name, is_local) in [("sda", true), ("sda/sda1", true), ("sdb", false)] {
            let found = identity_in(&dir.path().join(name)).unwrap();
            assert_eq!(is_local_name(&found), is_local, "{found}");
        }
    }
}
