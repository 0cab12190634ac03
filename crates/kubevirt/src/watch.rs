//! Notices that something may have changed: a pod, or a socket in one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

use crate::directory::Directory;
use crate::error::Trying;
use crate::{KubevirtError, Launcher, Node};

/// What is watched. A pod that has ended is forgotten by the kernel.
#[derive(Debug)]
pub struct Watch {
    inotify: OwnedFd,
}

impl Watch {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// If the system has no more of them.
    pub fn new() -> Result<Self, KubevirtError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        Ok(Self { inotify: inotify.trying("watching pods")? })
    }

    /// Watches for pods. Once more does no harm.
    ///
    /// # Errors
    /// If virt-handler's notes can't be watched: it may not have begun yet.
    pub fn node(&self, node: &Node) -> Result<(), KubevirtError> {
        let flags = WatchFlags::CREATE | WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO;
        let added = inotify::add_watch(&self.inotify, node.records(), flags);
        added.map(drop).trying("watching virt-handler's notes")
    }

    /// Watches for sockets in a pod. Once more does no harm.
    ///
    /// # Errors
    /// If it has ended.
    pub fn launcher(&self, launcher: &Launcher) -> Result<(), KubevirtError> {
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_TO;
        for (path, flags) in
            [(Directory::PARENT, WatchFlags::CREATE), (Directory::PATH, flags | WatchFlags::ATTRIB)]
        {
            let Some(opened) = launcher.open(path)? else { continue };
            let by_number = format!("/proc/self/fd/{}", opened.as_raw_fd());
            inotify::add_watch(&self.inotify, by_number, flags).trying("watching a pod")?;
        }
        Ok(())
    }

    /// Readable when something has changed.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Forgets what has changed until now.
    ///
    /// # Errors
    /// If the system doesn't say what has changed.
    pub fn clear(&self) -> io::Result<()> {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        loop {
            match rustix::io::read(&self.inotify, &mut buffer) {
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) | Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
