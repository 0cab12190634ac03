//! The directory of a pod's migration sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::Trying;
use crate::launcher::Launcher;
use crate::{KubevirtError, SocketName};

/// A file, as long as there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    number: u64,
}

/// Who has made a socket, and so what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// By QEMU, in the pod: a VM is to come.
    Inside,
    /// By virt-handler: one is to leave.
    Outside,
}

/// The directory.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    pid: u32,
}

impl Directory {
    /// Where it is in a pod.
    pub(crate) const PATH: &str = "var/run/kubevirt/migrationproxy";
    /// What it is made in.
    pub(crate) const PARENT: &str = "var/run/kubevirt";

    pub(crate) fn new(fd: OwnedFd, pid: u32) -> Self {
        Self { fd, pid }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens a socket, to be connected to by its number. None if it isn't there.
    ///
    /// # Errors
    /// If something else is there, such as a link.
    pub fn socket(&self, name: &SocketName) -> Result<Option<OwnedFd>, KubevirtError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = rustix::fs::openat2(&self.fd, name.to_string(), flags, Mode::empty(), resolve);
        let opened = match opened {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.trying("opening a socket of migrations")?,
        };
        let stat = rustix::fs::fstat(&opened).trying("looking at a socket of migrations")?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return Err(std::io::Error::other("it is no socket"))
                .trying("opening a socket of migrations");
        }
        Ok(Some(opened))
    }

    /// Who has made a socket that is there.
    ///
    /// # Errors
    /// If the pod has ended.
    pub fn made(&self, name: &SocketName) -> Result<Made, KubevirtError> {
        let inside = Launcher::made(self.pid, &name.to_string());
        let inside = inside.trying("asking for a pod's sockets")?;
        Ok(if inside { Made::Inside } else { Made::Outside })
    }

    /// Which file a socket is now. None if it isn't there.
    ///
    /// # Errors
    /// If the system doesn't say.
    pub fn which(&self, name: &SocketName) -> Result<Option<Inode>, KubevirtError> {
        self.inode(&name.to_string())
    }

    pub(crate) fn inode(&self, name: &str) -> Result<Option<Inode>, KubevirtError> {
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            stat => stat.map(|stat| Some(Inode::of(&stat))).trying("looking at a socket"),
        }
    }
}

impl Inode {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self { device: stat.st_dev, number: stat.st_ino }
    }
}
