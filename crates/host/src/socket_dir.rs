//! A directory of its own for one listening socket.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The socket's name in its directory.
pub const NAME: &str = "socket";

/// A directory that only its user may enter, with one listening socket. Both are removed when
/// this is dropped, also by a process that has no file descriptor left, which could not list the
/// directory first.
#[derive(Debug)]
pub struct SocketDir(PathBuf);

impl SocketDir {
    /// Listens in a new directory in `parent`, whose name begins with `prefix`.
    ///
    /// # Errors
    /// If the directory or its socket can't be made.
    pub fn listen(parent: &Path, prefix: &str) -> io::Result<(UnixListener, Self)> {
        let mut new = tempfile::Builder::new();
        let new = new.prefix(prefix).permissions(Permissions::from_mode(0o700));
        let dir = Self(new.tempdir_in(parent)?.keep());
        let listener = UnixListener::bind(dir.socket())?;
        Ok((listener, dir))
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The socket in it.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.0.join(NAME)
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        // Without a socket, if that could not be made.
        let _ = fs::remove_file(self.socket());
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::warn!(dir = %self.0.display(), %error, "a socket's directory can't be removed");
        }
    }
}
