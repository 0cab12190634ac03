//! The mounted file systems, from `/proc/self/mountinfo`.
//!
//! Nothing is looked up where that could query a server, or a program that serves FUSE: an
//! unresponsive one would block the helper forever.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A device's number, as in `254:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Number {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// File systems that query no server and no program when a path leads through them.
const LOCAL: [&str; 17] = [
    AUTOFS, "bcachefs", BTRFS, "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay",
    "ramfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs",
];
const BTRFS: &str = "btrfs";
/// Queries no program once something is mounted on it.
const AUTOFS: &str = "autofs";

/// A mount's ID, in `mountinfo` and in `/proc/PID/fdinfo`.
pub(crate) type MountId = u64;

/// A place where a file system is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    id: MountId,
    /// The mount that it is mounted on.
    parent: MountId,
    pub(crate) number: Number,
    /// The directory of the file system that is mounted.
    root: Vec<u8>,
    pub(crate) at: PathBuf,
    kind: String,
    options: String,
}

impl Mount {
    /// Whether files of this file system are on its device as they are in memory.
    fn is_suitable(&self) -> bool {
        let has = |option: &str| {
            self.options.split(',').any(|word| {
                word == option
                    || word.strip_prefix(option).is_some_and(|rest| rest.starts_with('='))
            })
        };
        match self.kind.as_str() {
            // Data in the journal is not in the file's blocks.
            "ext4" => !has("dax") && !self.options.split(',').any(|word| word == "data=journal"),
            // Some files are on a separate device, and look like the others.
            "xfs" => !has("dax") && !has("rtdev"),
            BTRFS => true,
            _ => false,
        }
    }

    /// Whether its device's number is not that of a disk, nor that which its files have.
    pub(crate) fn is_btrfs(&self) -> bool {
        self.kind == BTRFS
    }

    /// Whether its path leads to it without querying a server or a program on the way.
    fn is_in_reach(&self, all: &[Self]) -> bool {
        let mut way = vec![self];
        // The root is mounted on itself, or on a mount that is not visible.
        while let Some(on) = way.last().and_then(|last| all.iter().find(|on| on.id == last.parent))
            && way.iter().all(|known| known.id != on.id)
        {
            way.push(on);
        }
        let is_on_way = |id| way.iter().any(|mount| mount.id == id);
        let covers = |other: &Self| {
            !is_on_way(other.id) && is_on_way(other.parent) && self.at.starts_with(&other.at)
        };
        way.iter().all(|mount| mount.is_local()) && !all.iter().any(covers)
    }

    fn is_local(&self) -> bool {
        LOCAL.contains(&self.kind.as_str())
    }
}

/// The mounts to examine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mounts {
    /// Mounts of ext4, xfs and btrfs. Of a file system that is mounted several times, only the mount
    /// that shows all of it, if there is one.
    pub(crate) suitable: Vec<Mount>,
    /// Devices with other file systems, with unsuitable ones, or with unreachable ones.
    pub(crate) unsuitable: BTreeSet<Number>,
}

impl Mounts {
    /// Parses the texts of `mountinfo` and `/proc/filesystems`.
    pub(crate) fn parse(mountinfo: &[u8], filesystems: &str) -> Self {
        let on_disk =
            |kind: &str| filesystems.lines().any(|line| line.strip_prefix('\t') == Some(kind));
        let mut mounts = Self::default();
        let mut hidden = BTreeSet::new();
        let all: Vec<Mount> = each(mountinfo).collect();
        for mount in &all {
            if !mount.is_suitable() {
                if on_disk(&mount.kind) {
                    mounts.unsuitable.insert(mount.number);
                }
            } else if mount.is_in_reach(&all) {
                mounts.add(mount.clone());
            } else {
                hidden.insert(mount.number);
            }
        }
        hidden.retain(|number| mounts.suitable.iter().all(|mount| mount.number != *number));
        mounts.unsuitable.extend(hidden);
        mounts
    }

    fn add(&mut self, mount: Mount) {
        let is_whole = |mount: &Mount| mount.root == b"/";
        let same = |other: &&Mount| other.number == mount.number;
        let known = self
            .suitable
            .iter()
            .find(|other| same(other) && (is_whole(other) || other.root == mount.root));
        if known.is_some() {
            return;
        }
        if is_whole(&mount) {
            self.suitable.retain(|other| other.number != mount.number);
        }
        self.suitable.push(mount);
    }
}

/// The device of each mount, from the text of `mountinfo`.
pub(crate) fn devices(mountinfo: &[u8]) -> HashMap<MountId, Number> {
    each(mountinfo).map(|mount| (mount.id, mount.number)).collect()
}

/// Whether looking up this path queries no server and triggers no automount, according to the text
/// of `mountinfo`.
pub(crate) fn is_local(path: &Path, mountinfo: &[u8]) -> bool {
    let way: Vec<Mount> = each(mountinfo).filter(|mount| path.starts_with(&mount.at)).collect();
    // Of several mounts at one place, the last is on top.
    let end = way.iter().max_by_key(|mount| mount.at.as_os_str().len());
    way.iter().all(Mount::is_local) && end.is_none_or(|mount| mount.kind != AUTOFS)
}

fn each(mountinfo: &[u8]) -> impl Iterator<Item = Mount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(line)
}

/// `ID PARENT MAJOR:MINOR ROOT AT OPTIONS [FIELD]... - KIND SOURCE OPTIONS`
fn line(line: &[u8]) -> Option<Mount> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = words.iter().position(|word| *word == b"-")?;
    let text = |word: &[u8]| std::str::from_utf8(word).ok().map(str::to_owned);
    let number = text(words.get(2)?)?;
    let (major, minor) = number.split_once(':')?;
    Some(Mount {
        id: text(words.first()?)?.parse().ok()?,
        parent: text(words.get(1)?)?.parse().ok()?,
        number: Number { major: major.parse().ok()?, minor: minor.parse().ok()? },
        root: unescaped(words.get(3)?),
        at: PathBuf::from(OsString::from_vec(unescaped(words.get(4)?))),
        kind: text(words.get(dash + 1)?)?,
        options: text(words.get(dash + 3)?)?,
    })
}

/// Undoes escapes: spaces and the like are written as `\040`.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let code = match (first, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILESYSTEMS: &str = "nodev\tproc\nnodev\toverlay\n\text4\n\txfs\n\tbtrfs\n";

    fn parsed(text: &str) -> (Vec<(u32, String)>, Vec<u32>) {
        let mounts = Mounts::parse(text.as_bytes(), FILESYSTEMS);
        let suitable = mounts.suitable.iter();
        (
            suitable.map(|mount| (mount.number.minor, mount.at.display().to_string())).collect(),
            mounts.unsuitable.iter().map(|number| number.minor).collect(),
        )
    }

    #[test]
    fn suitable_mounts_are_found_once() {
        let text = r"21 1 0:20 / /proc rw - proc proc rw
30 1 254:1 / / rw,relatime shared:1 master:2 - ext4 /dev/vda1 rw
31 30 254:1 /home /else rw - ext4 /dev/vda1 rw
32 30 254:2 /a /only\040a rw - xfs /dev/vda2 rw,attr2
33 30 254:2 /a /again rw - xfs /dev/vda2 rw,attr2
34 30 254:2 /b /b rw - xfs /dev/vda2 rw,attr2
35 30 254:3 / /rt rw - xfs /dev/vda3 rw,rtdev=/dev/vdb
36 30 254:4 / /j rw - ext4 /dev/vda4 rw,data=journal
37 30 254:5 / /o rw - ext4 /dev/vda5 rw,data=ordered
38 30 254:6 / /d rw - ext4 /dev/vda6 rw,dax=always
39 30 0:44 / /ov rw - overlay overlay rw
40 30 0:45 /@ /btr rw - btrfs /dev/vda9 rw,subvol=/@
41 40 0:45 /@home /btr/home rw - btrfs /dev/vda9 rw,subvol=/@home
nonsense
";
        let expected =
            [(1, "/"), (2, "/only a"), (2, "/b"), (5, "/o"), (45, "/btr"), (45, "/btr/home")];
        let expected = expected.map(|(minor, at)| (minor, at.to_owned())).to_vec();
        assert_eq!(parsed(text), (expected, vec![3, 4, 6]));
    }

    #[test]
    fn mounts_below_or_behind_servers_are_not_looked_up() {
        let text = r"21 21 0:2 / / rw - rootfs rootfs rw
30 21 254:1 / / rw - ext4 /dev/vda1 rw
31 30 0:40 / /net rw - nfs4 server:/ rw
32 31 254:2 / /net/below rw - ext4 /dev/vda2 rw
33 30 254:3 / /covered rw - ext4 /dev/vda3 rw
34 33 0:41 / /covered rw - fuse.sshfs host: rw
35 30 254:4 / /a/b rw - ext4 /dev/vda4 rw
36 30 0:42 / /a rw - virtiofs share rw
37 30 0:43 / /auto rw - autofs systemd-1 rw
38 37 254:5 / /auto rw - ext4 /dev/vda5 rw
39 30 254:4 / /again rw - ext4 /dev/vda4 rw
40 30 0:44 / /covered/not rw - nfs4 server:/ rw
";
        let expected = [(1, "/"), (5, "/auto"), (4, "/again")];
        let expected = expected.map(|(minor, at)| (minor, at.to_owned())).to_vec();
        assert_eq!(parsed(text), (expected, vec![2, 3]));
        let devices = devices(text.as_bytes());
        assert_eq!((devices.len(), devices[&38]), (12, Number { major: 254, minor: 5 }));
        let local = |path: &str| is_local(Path::new(path), text.as_bytes());
        assert!(local("/etc/a") && local("/auto/a") && local("/network"));
        assert!(!local("/net/a") && !local("/net/below/a") && !local("/covered/a"));
        let empty = "1 1 8:1 / / rw - ext4 d rw\n2 1 0:9 / /boot rw - autofs systemd-1 rw\n";
        assert!(!is_local(Path::new("/boot/config"), empty.as_bytes()), "it would be mounted");
    }

    #[test]
    fn a_mount_of_the_whole_replaces_mounts_of_parts() {
        let text = "1 1 8:1 /a /a rw - ext4 d rw\n2 1 8:1 / /all rw - ext4 d rw\n";
        assert_eq!(parsed(text).0, [(1, "/all".to_owned())]);
    }

    #[test]
    fn escapes_are_undone() {
        let cases =
            [(&br"a\040b\134c"[..], &b"a b\\c"[..]), (br"\04", br"\04"), (br"\999", br"\999")];
        for (word, plain) in cases {
            assert_eq!(unescaped(word), plain);
        }
    }
}
