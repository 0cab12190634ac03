//! Notices possible changes in directories.

use std::cell::RefCell;
use std::collections::HashSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

use crate::error::{ManagerError, Trying};

/// Watches directories. The kernel drops a watch when its directory is deleted.
#[derive(Debug)]
pub struct Watch {
    inotify: OwnedFd,
    watched: RefCell<Watched>,
}

/// The kernel's watch descriptors.
#[derive(Debug, Default)]
struct Watched {
    all: HashSet<i32>,
    /// Those added since the last [`Watch::forget_others`].
    named: HashSet<i32>,
}

impl Watch {
    /// Watches no directory yet.
    ///
    /// # Errors
    /// If the system has no more inotify instances.
    pub fn new() -> Result<Self, ManagerError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        Ok(Self { inotify: inotify.trying("watching for sockets")?, watched: RefCell::default() })
    }

    /// Watches an open directory. Calling it again is harmless.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn directory(&self, directory: impl AsFd) -> Result<(), ManagerError> {
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_TO
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB;
        let by_number = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
        let number = inotify::add_watch(&self.inotify, by_number, flags);
        self.watched.borrow_mut().named.insert(number.trying("watching for sockets")?);
        Ok(())
    }

    /// Stops watching directories that were not added since the last call. The kernel keeps the
    /// watch of a directory that was renamed.
    pub fn forget_others(&self) {
        let mut watched = self.watched.borrow_mut();
        let named = std::mem::take(&mut watched.named);
        for other in watched.all.difference(&named) {
            // The directory may be deleted.
            let _ = inotify::remove_watch(&self.inotify, *other);
        }
        watched.all = named;
    }

    /// Readable when something has changed.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Discards all events so far.
    ///
    /// # Errors
    /// If the events can't be read.
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

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::takeover::Directory;

    #[test]
    fn what_is_made_is_noticed_once() {
        let dir = tempfile::tempdir().unwrap();
        let watch = Watch::new().unwrap();
        for _ in 0..2 {
            watch.directory(Directory::open(dir.path()).unwrap().unwrap()).unwrap();
        }
        let changed = || {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&watch.fd(), PollFlags::IN)], Some(&at_once)).unwrap() == 1
        };
        assert!(!changed());
        std::fs::write(dir.path().join("new"), "").unwrap();
        assert!(changed());
        watch.clear().unwrap();
        assert!(!changed());
    }

    #[test]
    fn a_directory_that_is_not_added_again_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let (at, aside) = (dir.path().join("at"), dir.path().join("aside"));
        let watch = Watch::new().unwrap();
        let watch_at = || {
            std::fs::create_dir(&at).unwrap();
            watch.directory(Directory::open(&at).unwrap().unwrap()).unwrap();
            watch.forget_others();
        };
        watch_at();
        std::fs::rename(&at, &aside).unwrap();
        watch_at();
        watch.clear().unwrap();
        let changed = || {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&watch.fd(), PollFlags::IN)], Some(&at_once)).unwrap() == 1
        };
        std::fs::write(aside.join("new"), "").unwrap();
        assert!(!changed());
        std::fs::write(at.join("new"), "").unwrap();
        assert!(changed());
    }
}
