//! A directory of sockets.

use std::ffi::CStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::resolve::open_socket;
use crate::error::{ManagerError, Trying};

/// Identifies a file as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    number: u64,
}

/// A directory, kept open.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
}

impl From<OwnedFd> for Directory {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Directory {
    /// Opens it. None if it doesn't exist.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn open(path: &Path) -> Result<Option<Self>, ManagerError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => Ok(None),
            opened => opened.map(|fd| Some(fd.into())).trying("opening a directory of sockets"),
        }
    }

    /// The names of its entries, without those that are not UTF-8.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn names(&self) -> Result<Vec<String>, ManagerError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let readable = rustix::fs::openat(&self.fd, c".", flags, Mode::empty());
        let entries = readable.and_then(Dir::new).trying("reading a directory of sockets")?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.trying("reading a directory of sockets")?;
            names.extend(CStr::to_str(entry.file_name()).ok().map(str::to_owned));
        }
        Ok(names)
    }

    /// Opens a socket file, to connect to it by its descriptor. None if it doesn't exist.
    ///
    /// # Errors
    /// If the name is something else, such as a link.
    pub fn socket(&self, name: &str) -> Result<Option<OwnedFd>, ManagerError> {
        match open_socket(&self.fd, Path::new(name), ResolveFlags::BENEATH) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).trying("opening a socket"),
        }
    }

    /// The file that has that name now. None if there is none.
    ///
    /// # Errors
    /// If the system doesn't report it.
    pub fn which(&self, name: &str) -> Result<Option<Inode>, ManagerError> {
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            stat => stat.map(|stat| Some(Inode::of(&stat))).trying("reading a socket"),
        }
    }
}

impl Inode {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self { device: stat.st_dev, number: stat.st_ino }
    }
}
