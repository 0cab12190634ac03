//! Files that have no name any more and are still open somewhere: logs, temporary
//! files of databases, programs that were replaced.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::file;

/// Where some process has such a file open.
pub(crate) fn open_somewhere() -> impl Iterator<Item = PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_number = |name: &[u8]| name.iter().all(u8::is_ascii_digit);
    processes
        .filter(move |entry| is_number(entry.file_name().as_bytes()))
        .flat_map(|entry| fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| fs::read_link(path).is_ok_and(|link| is_deleted(&link)))
}

/// Memory that looks like a file has no directory in front.
fn is_deleted(link: &Path) -> bool {
    let link = link.as_os_str().as_bytes();
    let of_memory = [&b"/memfd:"[..], b"/dev/shm/", b"/SYSV"];
    link.starts_with(b"/")
        && link.ends_with(b" (deleted)")
        && !of_memory.iter().any(|start| link.starts_with(start))
}

/// Opens it, if it is a regular file without a name; with its device and inode.
pub(crate) fn open(path: &Path) -> io::Result<Option<(OwnedFd, u64, u64)>> {
    // Whatever else it may be by now, this doesn't wake it.
    let glimpse = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let Some(stat) = file::regular(&glimpse)?.filter(|stat| stat.st_nlink == 0) else {
        return Ok(None);
    };
    let own = format!("/proc/self/fd/{}", glimpse.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
    let opened = openat(CWD, own, flags, Mode::empty())?;
    Ok(Some((opened, stat.st_dev, stat.st_ino)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_open_file_without_a_name_is_found() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let mut file = named.reopen().unwrap();
        file.write_all(b"content").unwrap();
        let mine = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let is_listed = || open_somewhere().any(|path| path == Path::new(&mine));
        assert!(!is_listed());
        assert!(open(Path::new(&mine)).unwrap().is_none(), "it has a name");
        drop(named);
        assert!(is_listed());
        assert!(open(Path::new(&mine)).unwrap().is_some());
    }

    #[test]
    fn memory_is_no_file() {
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
