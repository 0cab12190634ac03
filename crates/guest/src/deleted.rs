//! Files that have no name any more but are still open: logs, temporary files of databases,
//! programs that were replaced.
//!
//! A process may have a file of an unresponsive server open. So the kernel is asked for the mount
//! through which a file was opened, before the file itself is touched: even referring to one by its
//! path can query its server.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::file;
use crate::mounts::{MountId, Number, devices};

/// The device of each mount.
type Devices = HashMap<MountId, Number>;

/// The path below `/proc` of a file without a name, and its device.
type Deleted = (PathBuf, Number);

/// The open files of all processes: such a file on one of these devices, and None for each other
/// one. A guest may have a million of those.
pub(crate) fn open_somewhere(wanted: HashSet<Number>) -> impl Iterator<Item = Option<Deleted>> {
    let ours = Rc::new(mounted(Path::new("/proc/self")));
    let wanted = Rc::new(wanted);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_number = |name: &[u8]| name.iter().all(u8::is_ascii_digit);
    processes
        .filter(move |entry| is_number(entry.file_name().as_bytes()))
        .flat_map(move |entry| open_in(entry.path(), Rc::clone(&ours), Rc::clone(&wanted)))
}

/// The same for one process.
fn open_in(
    process: PathBuf,
    ours: Rc<Devices>,
    wanted: Rc<HashSet<Number>>,
) -> impl Iterator<Item = Option<Deleted>> {
    let opened = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    // A container has its own mounts. They are read if a file's mount is not one of ours.
    let mut theirs: Option<Devices> = None;
    let mut wanted_device = move |path: &Path| {
        fs::read_link(path).ok().filter(|link| is_deleted(link))?;
        let mount = mount_of(&process, path)?;
        let device = ours.get(&mount).copied().or_else(|| {
            let theirs = theirs.get_or_insert_with(|| mounted(&process));
            theirs.get(&mount).copied()
        });
        device.filter(|device| wanted.contains(device))
    };
    opened.map(|entry| entry.path()).map(move |path| {
        let device = wanted_device(&path)?;
        Some((path, device))
    })
}

/// The mounts that a process sees.
fn mounted(process: &Path) -> Devices {
    devices(&fs::read(process.join("mountinfo")).unwrap_or_default())
}

/// The mount through which a process has opened the file at this path below its `fd`.
fn mount_of(process: &Path, opened: &Path) -> Option<MountId> {
    let about = fs::read_to_string(process.join("fdinfo").join(opened.file_name()?)).ok()?;
    let id = about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    id.trim().parse().ok()
}

/// Whether the link is of a deleted file on disk, and not of a memory-backed one.
fn is_deleted(link: &Path) -> bool {
    let link = link.as_os_str().as_bytes();
    let of_memory = [&b"/memfd:"[..], b"/dev/shm/", b"/SYSV"];
    link.starts_with(b"/")
        && link.ends_with(b" (deleted)")
        && !of_memory.iter().any(|start| link.starts_with(start))
}

/// Opens it if it is a regular file without a name; returns its device and inode too. The process
/// may have opened another file under this number by now, which can't be ruled out.
pub(crate) fn open(path: &Path) -> io::Result<Option<(OwnedFd, u64, u64)>> {
    // `O_PATH` has no side effects, whatever the path refers to by now.
    let glimpse = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let Some(stat) = file::regular(&glimpse)?.filter(|stat| stat.st_nlink == 0) else {
        return Ok(None);
    };
    let own = format!("/proc/self/fd/{}", glimpse.as_raw_fd());
    // `O_NONBLOCK` avoids waiting for the holder of a lease.
    let quiet = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOATIME | OFlags::CLOEXEC;
    let opened = openat(CWD, own, OFlags::RDONLY | quiet, Mode::empty())?;
    Ok(Some((opened, stat.st_dev, stat.st_ino)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_open_file_without_a_name_is_found_on_devices_that_are_wanted() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let mut file = named.reopen().unwrap();
        file.write_all(b"content").unwrap();
        let process = PathBuf::from(format!("/proc/{}", std::process::id()));
        let mine = process.join("fd").join(file.as_raw_fd().to_string());
        let mount = mount_of(&process, &mine).unwrap();
        let device = mounted(&process)[&mount];
        let is_listed =
            |device| open_somewhere(HashSet::from([device])).flatten().any(|one| one.0 == mine);
        assert!(!is_listed(device));
        assert!(open(&mine).unwrap().is_none(), "it has a name");
        drop(named);
        assert!(is_listed(device));
        let other = Number { minor: device.minor + 1, ..device };
        assert!(!is_listed(other), "what is elsewhere is not touched");
        assert!(open(&mine).unwrap().is_some());
        // In a container, all mounts have other IDs.
        let there = |ours| open_in(process.clone(), Rc::new(ours), Rc::new([device].into()));
        assert!(there(Devices::default()).flatten().any(|one| one == (mine.clone(), device)));
        let all = open_in(process.clone(), Rc::default(), Rc::default());
        assert!(all.filter(Option::is_none).count() > 2, "a caller can rest at each");
    }

    #[test]
    fn memory_backed_files_are_not_listed() {
        let cases = [
            ("/var/log/a (deleted)", true),
            ("/var/log/a", false),
            ("/memfd:x (deleted)", false),
            ("pipe:[1] (deleted)", false),
        ];
        for (link, deleted) in cases {
            assert_eq!(is_deleted(Path::new(link)), deleted, "{link}");
        }
    }
}
