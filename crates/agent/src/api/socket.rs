//! The API's unix socket: for its owner, for one group if the operator names one, and for
//! one agent at a time.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::state::SOCKET_PATH_MAX;

/// Why the socket can't be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error(
        "another agent answers at {}: stop it first, or give this one a socket of its own with \
         --api", .0.display()
    )]
    InUse(PathBuf),
    /// Another kind of file is there.
    #[error("{} exists and is not a socket: remove it, or choose another --api", .0.display())]
    NotASocket(PathBuf),
    /// The path exceeds the kernel's limit.
    #[error(
        "the API's socket {} has a path of {} bytes, and the kernel allows {}: choose a shorter \
         --api", .0.display(), .0.as_os_str().len(), SOCKET_PATH_MAX - SUFFIX.len()
    )]
    TooLong(PathBuf),
    /// An operation on it failed.
    #[error("the API's socket {}: {source}", path.display())]
    Local {
        /// Its path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// The suffix of the socket's name until its owner and mode are set.
const SUFFIX: &str = ".new";

/// A socket that is removed when this is dropped.
pub(crate) struct ApiSocket {
    path: PathBuf,
}

impl ApiSocket {
    /// Listens at `path`, and replaces a socket that a crashed agent left there.
    pub(crate) fn bind(
        path: &Path,
        group: Option<u32>,
    ) -> Result<(Self, UnixListener), SocketError> {
        let local = |source| SocketError::Local { path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(local)?;
        if path.as_os_str().as_bytes().len() > SOCKET_PATH_MAX - SUFFIX.len() {
            return Err(SocketError::TooLong(path));
        }
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(local)?;
        }
        check_unused(&path)?;
        let mut new = path.clone().into_os_string();
        new.push(SUFFIX);
        // Left by an agent that ended between the lines below.
        let _ = fs::remove_file(&new);
        let listener = UnixListener::bind(&new).map_err(local)?;
        if group.is_some() {
            std::os::unix::fs::chown(&new, None, group).map_err(local)?;
        }
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        fs::set_permissions(&new, Permissions::from_mode(mode)).map_err(local)?;
        fs::rename(&new, &path).map_err(local)?;
        Ok((Self { path }, listener))
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        // It may be removed already.
        let _ = fs::remove_file(&self.path);
    }
}

fn check_unused(path: &Path) -> Result<(), SocketError> {
    match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(there) if !there.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::InUse(path.to_owned())),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_for_its_owner_and_goes_with_its_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/api.sock");
        let (socket, _listener) = ApiSocket::bind(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(ApiSocket::bind(&path, None), Err(SocketError::InUse(_))));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_group_may_use_it_if_it_is_named() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        // Any group that the user of this test belongs to.
        let group = rustix::process::getegid().as_raw();
        let _socket = ApiSocket::bind(&path, Some(group)).unwrap();
        let there = fs::metadata(&path).unwrap();
        assert_eq!((there.mode() & 0o777, there.gid()), (0o660, group));
    }

    #[test]
    fn a_stale_one_is_replaced_and_other_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "as a crash leaves it");
        ApiSocket::bind(&path, None).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(ApiSocket::bind(&path, None), Err(SocketError::NotASocket(_))));
        let long = dir.path().join("x".repeat(100));
        assert!(matches!(ApiSocket::bind(&long, None), Err(SocketError::TooLong(_))));
    }
}
