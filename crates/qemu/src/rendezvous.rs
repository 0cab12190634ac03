//! A socket of ours where one QEMU connects, whoever it runs as.
//!
//! A QEMU that gave up its user (`-runas`, `-run-with user=`) can't look into
//! the agent's directories, and one under libvirt may not even see them: it has
//! mounts of its own. So the socket's directory is handed to it as an open file,
//! and QEMU goes on from there, by its own `/proc/self/fd`. The directory lies
//! in one that only the agent can enter: nobody else gets there.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::machine::Machine;
use crate::qmp::{Qmp, QmpError, odd};

/// The socket's name in its directory.
const NAME: &str = "socket";
/// It only closes a file; a QEMU that is busy does so when it ends.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// Why QEMU has no socket to connect to.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// This host.
    #[error("making a socket for QEMU in {}: {source}", dir.display())]
    Local {
        /// Where.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU doesn't take the directory.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A unix socket that goes with this value.
#[derive(Debug)]
pub struct Rendezvous {
    qmp: Arc<Qmp>,
    /// QEMU's number for the directory's place among what it was handed.
    fdset: u64,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Rendezvous {
    /// Listens for `machine` in a directory of its own in `scratch`, which only
    /// the agent can enter.
    ///
    /// # Errors
    /// If it can't be made, or QEMU can't be handed its directory.
    pub fn open(
        machine: &Machine,
        scratch: &Path,
    ) -> Result<(UnixListener, Self), RendezvousError> {
        let local = |source| RendezvousError::Local { dir: scratch.to_owned(), source };
        let dir = tempfile::Builder::new().prefix("q-").tempdir_in(scratch).map_err(local)?;
        let socket = dir.path().join(NAME);
        let listener = UnixListener::bind(&socket).map_err(local)?;
        let allow = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        allow(&socket, 0o666).and_then(|()| allow(dir.path(), 0o711)).map_err(local)?;
        let opened = File::open(dir.path()).map_err(local)?;
        let qmp = Arc::clone(&machine.qmp);
        let answer = qmp.execute_with(opened.as_fd(), "add-fd", json!({}))?;
        let number = |name: &str| answer[name].as_u64().ok_or_else(|| odd("add-fd", &answer));
        let path = PathBuf::from(format!("/proc/self/fd/{}/{NAME}", number("fd")?));
        Ok((listener, Self { fdset: number("fdset-id")?, qmp, path, _dir: dir }))
    }

    /// The socket as its QEMU sees it.
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
