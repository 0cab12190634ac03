//! A socket of the agent to which one QEMU connects, whatever its user.
//!
//! A QEMU that changed its user (`-runas`, `-run-with user=`) can't enter the
//! agent's directories, and one under libvirt may not even see them: it has its
//! own mount namespace. So QEMU is passed the socket's directory as an open file,
//! and reaches the socket through its own `/proc/self/fd`. The directory is inside
//! one that only the agent can enter, so no other process reaches the socket.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use host::socket_dir::{self, SocketDir};
use serde_json::json;

use crate::machine::Machine;
use crate::qmp::{Qmp, QmpError, odd};

/// How long QEMU may take to close the directory; if it is busy, it does so when it
/// ends.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// Why QEMU has no socket to connect to.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The socket can't be made.
    #[error("making a socket for QEMU in {}: {source}", dir.display())]
    Local {
        /// Where.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU doesn't accept the directory.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A unix socket that is removed when this is dropped.
#[derive(Debug)]
pub struct Rendezvous {
    qmp: Arc<Qmp>,
    /// QEMU's fd set that holds the directory.
    fdset: u64,
    path: PathBuf,
    _dir: SocketDir,
}

impl Rendezvous {
    /// Listens for `machine` in a directory of its own in `scratch`, which only
    /// the agent can enter.
    ///
    /// # Errors
    /// If the socket can't be made, or its directory can't be passed to QEMU.
    pub fn open(
        machine: &Machine,
        scratch: &Path,
    ) -> Result<(UnixListener, Self), RendezvousError> {
        let local = |source| RendezvousError::Local { dir: scratch.to_owned(), source };
        let (listener, dir) = SocketDir::listen(scratch, "q-").map_err(local)?;
        let allow = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        allow(&dir.socket(), 0o666).and_then(|()| allow(dir.path(), 0o711)).map_err(local)?;
        let opened = File::open(dir.path()).map_err(local)?;
        let qmp = Arc::clone(&machine.qmp);
        let answer = qmp.execute_with(opened.as_fd(), "add-fd", json!({}))?;
        let number = |name: &str| answer[name].as_u64().ok_or_else(|| odd("add-fd", &answer));
        let path = PathBuf::from(format!("/proc/self/fd/{}/{}", number("fd")?, socket_dir::NAME));
        Ok((listener, Self { fdset: number("fdset-id")?, qmp, path, _dir: dir }))
    }

    /// The socket's path, as QEMU sees it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let close = json!({ "fdset-id": self.fdset });
        match self.qmp.execute_within("remove-fd", close, CLOSE_MAX) {
            Ok(_) | Err(QmpError::Closed) => {}
            Err(error) => tracing::debug!(%error, "QEMU keeps a directory open until it ends"),
        }
    }
}
