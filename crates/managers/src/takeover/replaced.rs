//! A socket of ours that listens in place of another program's for a while.
//!
//! ```text
//! X              the name that clients connect to: ours
//! X.kept         theirs, to be restored, and to pass clients on to
//! X.droveway     ours again: shows after a crash that X has no listener
//! ```
//!
//! The name always exists: a rename moves it from one socket to the other.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use qemu::socket::connect_opened;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::directory::{Directory, Inode};
use crate::error::{ManagerError, Trying};

/// A program that made a socket is expected to accept connections.
const ACCEPTS_MAX: Duration = Duration::from_secs(5);

/// A socket in place of another, whose place it gives back when dropped.
#[derive(Debug)]
pub struct Replaced {
    name: String,
    directory: Directory,
    listener: UnixListener,
    /// Our socket file.
    own: OwnedFd,
    /// Their socket file. It is kept open because another user with write access to the directory
    /// could give its name to something else, such as a link to a socket that only we may use.
    theirs: OwnedFd,
    inode: Inode,
}

fn theirs(name: &str) -> String {
    format!("{name}.kept")
}

fn mark(name: &str) -> String {
    format!("{name}.droveway")
}

fn next(name: &str) -> String {
    format!("{name}.next")
}

impl Directory {
    /// Puts a socket of ours in place of another program's.
    ///
    /// # Errors
    /// If theirs doesn't exist, or the system refuses. Then everything is as before.
    pub fn replace(self, name: String) -> Result<Replaced, ManagerError> {
        // Restores what a killed run left behind.
        self.give_back(&name)?;
        let listener = UnixListener::bind(self.by_number(&mark(&name)));
        let listener = listener.trying("replacing another program's socket")?;
        let own = self.owned(&mark(&name));
        let replaced = own.and_then(|(own, inode)| {
            let other = self.socket(&name)?.ok_or(Errno::NOENT);
            let other = other.trying("keeping another program's socket")?;
            listener.set_nonblocking(true).trying("replacing another program's socket")?;
            let to = self.as_fd();
            let kept = rustix::fs::linkat(to, &*name, to, theirs(&name), AtFlags::empty());
            kept.trying("keeping another program's socket")?;
            let stat = rustix::fs::fstat(&other).trying("keeping another program's socket")?;
            if self.which(&theirs(&name))? != Some(Inode::of(&stat)) {
                return Err(io::Error::other("it has changed"))
                    .trying("keeping another program's socket");
            }
            let linked = rustix::fs::linkat(to, mark(&name), to, next(&name), AtFlags::empty());
            linked.trying("naming a socket")?;
            let renamed = rustix::fs::renameat(to, next(&name), to, &*name);
            renamed.trying("replacing another program's socket")?;
            Ok((own, inode, other))
        });
        match replaced {
            Ok((own, inode, theirs)) => {
                let replaced = Replaced { name, directory: self, listener, own, theirs, inode };
                replaced.take_owner()?;
                Ok(replaced)
            }
            Err(error) => {
                self.remove([mark(&name), theirs(&name), next(&name)]);
                Err(error)
            }
        }
    }

    /// Restores what an agent that was killed left behind.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn give_back(&self, name: &str) -> Result<(), ManagerError> {
        let Some(own) = self.which(&mark(name))? else { return Ok(()) };
        if self.which(name)? == Some(own) {
            match rustix::fs::renameat(self.as_fd(), theirs(name), self.as_fd(), name) {
                // Without their socket, the name has no listener.
                Err(Errno::NOENT) => self.remove([name.to_owned()]),
                renamed => renamed.trying("restoring another program's socket")?,
            }
        }
        self.remove([mark(name), theirs(name), next(name)]);
        Ok(())
    }

    fn remove(&self, names: impl IntoIterator<Item = String>) {
        for name in names {
            // It may not exist, or the pod may have ended.
            let _ = rustix::fs::unlinkat(self.as_fd(), name, AtFlags::empty());
        }
    }

    /// A path through the descriptor, because socket paths are limited in length.
    fn by_number(&self, name: &str) -> String {
        format!("/proc/self/fd/{}/{name}", self.as_fd().as_raw_fd())
    }

    fn owned(&self, name: &str) -> Result<(OwnedFd, Inode), ManagerError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let own = rustix::fs::openat(self.as_fd(), name, flags, Mode::empty());
        let own = own.trying("opening the agent's socket")?;
        let stat = rustix::fs::fstat(&own).trying("reading the agent's socket")?;
        Ok((own, Inode::of(&stat)))
    }
}

impl Replaced {
    /// The name of the socket.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Our listener.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Readable when a client connects.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Whether the name still refers to our socket: the other program may have removed it, or made
    /// a new one.
    #[must_use]
    pub fn is_there(&self) -> bool {
        matches!(self.directory.which(&self.name), Ok(Some(now)) if now == self.inode)
    }

    /// Gives our socket the owner of theirs, which is QEMU's user. virt-handler changes its own
    /// socket's owner, by the name, a moment after it has made the socket.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn take_owner(&self) -> Result<(), ManagerError> {
        let theirs = rustix::fs::fstat(&self.theirs)
            .trying("reading the owner of another program's socket")?;
        let ours =
            rustix::fs::fstat(&self.own).trying("reading the owner of the agent's socket")?;
        if theirs.st_uid == 0 || (ours.st_uid, ours.st_gid) == (theirs.st_uid, theirs.st_gid) {
            return Ok(());
        }
        let (user, group) = (Uid::from_raw(theirs.st_uid), Gid::from_raw(theirs.st_gid));
        rustix::fs::chownat(&self.own, "", Some(user), Some(group), AtFlags::EMPTY_PATH)
            .trying("giving a socket to QEMU's user")
    }

    /// Connects to the other program's socket.
    ///
    /// # Errors
    /// If nothing listens there any more.
    pub fn connect(&self) -> io::Result<UnixStream> {
        connect_opened(&self.theirs, ACCEPTS_MAX)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        // Another socket may have taken the place by now.
        let given_back = self.directory.which(&mark(&self.name)).and_then(|now| {
            if now == Some(self.inode) { self.directory.give_back(&self.name) } else { Ok(()) }
        });
        if let Err(error) = given_back {
            tracing::debug!(
                socket = %self.name,
                %error,
                "cannot restore a socket: its directory may be missing"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;

    fn directory(path: &Path) -> Directory {
        Directory::open(path).unwrap().unwrap()
    }

    const NAME: &str = "vm.sock";

    /// The text that a client sent to a listener.
    fn received(listener: &UnixListener) -> String {
        listener.set_nonblocking(false).unwrap();
        let mut text = String::new();
        listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        text
    }

    fn say(path: &Path, text: &str) {
        UnixStream::connect(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn clients_reach_us_until_the_place_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let handler = UnixListener::bind(&path).unwrap();
        let replaced = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        say(&path, "to us");
        assert_eq!(received(replaced.listener()), "to us");
        replaced.connect().unwrap().write_all(b"bypass").unwrap();
        assert_eq!(received(&handler), "bypass");
        assert!(replaced.is_there());
        drop(replaced);
        say(&path, "back");
        assert_eq!(received(&handler), "back");
        assert_eq!(names(dir.path()), [NAME]);
    }

    #[test]
    fn a_link_in_place_of_their_socket_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let handler = UnixListener::bind(dir.path().join(NAME)).unwrap();
        let secret = UnixListener::bind(elsewhere.path().join("api.sock")).unwrap();
        secret.set_nonblocking(true).unwrap();
        let replaced = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        let theirs = dir.path().join(theirs(NAME));
        fs::remove_file(&theirs).unwrap();
        std::os::unix::fs::symlink(elsewhere.path().join("api.sock"), &theirs).unwrap();
        replaced.connect().unwrap().write_all(b"bypass").unwrap();
        assert_eq!(received(&handler), "bypass");
        assert!(secret.accept().is_err());
    }

    #[test]
    fn our_socket_gets_the_owner_of_theirs() {
        if !rustix::process::geteuid().is_root() {
            return; // Only root may change a file's owner.
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let _handler = UnixListener::bind(&path).unwrap();
        let replaced = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().uid(), 0);
        let theirs = dir.path().join(theirs(NAME));
        std::os::unix::fs::chown(&theirs, Some(107), Some(107)).unwrap();
        replaced.take_owner().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().uid(), 107);
    }

    #[test]
    fn what_a_killed_run_left_is_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let handler = UnixListener::bind(&path).unwrap();
        let killed = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        std::mem::forget(killed);
        directory(dir.path()).give_back(NAME).unwrap();
        say(&path, "again");
        assert_eq!(received(&handler), "again");
        assert_eq!(names(dir.path()), [NAME]);
    }

    #[test]
    fn a_new_socket_of_theirs_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let _handler = UnixListener::bind(&path).unwrap();
        let replaced = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!replaced.is_there());
        let other = UnixListener::bind(&path).unwrap();
        assert!(!replaced.is_there());
        drop(replaced);
        say(&path, "new");
        assert_eq!(received(&other), "new");
        assert_eq!(names(dir.path()), [NAME]);
    }

    #[test]
    fn a_socket_that_was_replaced_gives_nothing_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let _first = UnixListener::bind(&path).unwrap();
        let old = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        let new = directory(dir.path()).replace(NAME.to_owned()).unwrap();
        drop(old);
        say(&path, "to the new one");
        assert_eq!(received(new.listener()), "to the new one");
        drop(new);
        say(&path, "back");
        assert_eq!(received(&second), "back");
        assert_eq!(names(dir.path()), [NAME]);
    }

    #[test]
    fn without_a_socket_there_is_nothing_to_replace() {
        let dir = tempfile::tempdir().unwrap();
        let error = directory(dir.path()).replace(NAME.to_owned()).unwrap_err().to_string();
        assert!(error.contains("another program's socket"), "{error}");
        assert_eq!(names(dir.path()), Vec::<String>::new());
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(NAME)).unwrap();
        assert!(directory(dir.path()).socket(NAME).is_err());
    }
}
