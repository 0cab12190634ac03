//! Opens files without side effects, and determines their kind.

#![expect(unsafe_code, reason = "rustix has no GETFLAGS and no cachestat")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, SeekFrom, Stat, fstat, openat2, seek};
use rustix::io::Errno;

/// `FS_IOC_GETFLAGS`, `_IOR('f', 1, long)`.
const GET_FLAGS: libc::Ioctl = 0x8008_6601;
/// `FS_COMPR_FL`, `FS_ENCRYPT_FL`, `FS_JOURNAL_DATA_FL`, `FS_DAX_FL`, `FS_INLINE_DATA_FL`: such a
/// file's content on disk, if any, differs from its content in memory. ext4's FIEMAP alone does not
/// show all of them.
const REFUSED: libc::c_int = 0x4 | 0x800 | 0x4000 | 0x0200_0000 | 0x1000_0000;

/// `cachestat`, Linux 6.5 and newer.
const SYS_CACHESTAT: libc::c_long = 451;

/// How thoroughly a walk searches for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Only files in the kernel's dentry cache: nothing is read from disk, and the kernel caches
    /// nothing for us.
    Remembered,
    /// All files.
    Full,
}

impl Effort {
    /// Paths never cross mounts, and never follow links.
    fn resolve(self) -> ResolveFlags {
        let usual = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        match self {
            Self::Remembered => usual | ResolveFlags::CACHED,
            Self::Full => usual,
        }
    }
}

const QUIET: OFlags = OFlags::NOATIME.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Opens a directory to list it.
pub(crate) fn directory(root: BorrowedFd<'_>, path: &[u8], effort: Effort) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | QUIET;
    Ok(openat2(root, path, flags, Mode::empty(), effort.resolve())?)
}

/// Refers to a file without opening it.
pub(crate) fn glimpse(at: BorrowedFd<'_>, name: &[u8], effort: Effort) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(openat2(at, name, flags, Mode::empty(), effort.resolve())?)
}

/// Opens a regular file to look at its pages.
pub(crate) fn file(root: BorrowedFd<'_>, path: &[u8], effort: Effort) -> io::Result<OwnedFd> {
    // It was a regular file, but may be a pipe by now, whose opening would block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | QUIET;
    Ok(openat2(root, path, flags, Mode::empty(), effort.resolve())?)
}

/// Its status, if it is a regular file with content.
pub(crate) fn regular(file: &OwnedFd) -> io::Result<Option<Stat>> {
    let stat = fstat(file)?;
    let is_regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    Ok(Some(stat).filter(|stat| is_regular && stat.st_size > 0))
}

/// Whether its content on disk is the same as in memory.
pub(crate) fn is_plain(file: &OwnedFd) -> io::Result<bool> {
    let mut flags: libc::c_long = 0;
    // SAFETY: the kernel writes an int, for which there is room.
    if unsafe { libc::ioctl(file.as_raw_fd(), GET_FLAGS, &raw mut flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(flags & libc::c_long::from(REFUSED) == 0)
}

/// How many of its pages are in the page cache, if the kernel says so.
pub(crate) fn cached_pages(file: &OwnedFd) -> Option<u64> {
    // A length of 0 means the whole file.
    let range = [0_u64; 2];
    let mut stat = [0_u64; 5];
    let file = libc::c_long::from(file.as_fd().as_raw_fd());
    let none: libc::c_long = 0;
    // SAFETY: the kernel reads two numbers and writes five, which outlive the call.
    let done =
        unsafe { libc::syscall(SYS_CACHESTAT, file, range.as_ptr(), stat.as_mut_ptr(), none) };
    (done == 0).then_some(stat[0])
}

/// The offset of a file's next data from `from` on. None if only a hole is left.
pub(crate) fn next_data(file: &OwnedFd, from: u64) -> Option<u64> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(at) => Some(at),
        Err(Errno::NXIO) => None,
        // The file system doesn't support this.
        Err(_) => Some(from),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn holes_are_skipped() {
        let sparse = tempfile::tempfile().unwrap();
        let at = 1 << 40;
        std::os::unix::fs::FileExt::write_all_at(&sparse, &[1; 4096], at).unwrap();
        sparse.set_len(2 << 40).unwrap();
        let sparse = OwnedFd::from(sparse);
        assert_eq!(next_data(&sparse, 0), Some(at));
        assert_eq!(next_data(&sparse, at + 100), Some(at + 100));
        assert_eq!(next_data(&sparse, at + (1 << 30)), None);
    }

    #[test]
    fn files_are_opened_only_below_the_root_and_never_through_links() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/file"), [1; 9000]).unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("a/link")).unwrap();
        let dots = rustix::fs::openat(CWD, dir.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
        for effort in [Effort::Remembered, Effort::Full] {
            let root = dots.as_fd();
            directory(root, b"a", effort).unwrap();
            let opened = file(root, b"a/file", effort).unwrap();
            assert_eq!(regular(&opened).unwrap().unwrap().st_size, 9000);
            assert_eq!(is_plain(&opened).ok(), Some(true));
            assert!(cached_pages(&opened).is_none_or(|pages| pages == 3));
            assert!(glimpse(root, b"a/file", effort).is_ok());
            assert!(file(root, b"a/link", effort).is_err());
            assert!(file(root, b"a/../../etc/passwd", effort).is_err());
            assert!(directory(root, b"a/file", effort).is_err());
            assert!(regular(&directory(root, b"a", effort).unwrap()).unwrap().is_none());
        }
    }
}
