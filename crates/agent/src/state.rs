//! The state directory: the agent's state that must survive a restart.
//!
//! ```text
//! STATE/lock              held by the running agent
//! STATE/vms/NAME/         one VM: record.json, qmp, qemu.log, qemu.log.1
//! STATE/vms/NAME/2/       its second seat: the same for a QEMU that got it on this host
//! STATE/reports/ID.json   one ended migration
//! STATE/gangs/ID.json     one gang that this agent coordinates, or did
//! STATE/journals/         unfinished switchovers
//! STATE/domains/          the same of domains of Xen
//! STATE/slowed/           throttled VMs, whose throttles are lifted after a crash
//! STATE/run/              sockets of running migrations; emptied at start
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

/// The kernel's limit for a unix socket's path, without the final zero byte.
pub(crate) const SOCKET_PATH_MAX: usize = 107;
/// The end of a QMP socket's path, after the VM's directory.
const QMP: &str = "/qmp";
/// A state directory that leaves less than this for names is refused.
const NAME_LETTERS_MIN: usize = 16;

/// Why a state directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It can't be created or read.
    #[error("the state directory {}: {source}", path.display())]
    Unusable {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Another agent uses it.
    #[error(
        "another agent uses the state directory {}: stop it first, or give this one a directory \
         of its own with --state", .0.display()
    )]
    InUse(PathBuf),
    /// Sockets in it would have names that the kernel refuses.
    #[error(
        "the path of the state directory {} is too long by {excess} bytes: paths of unix sockets \
         may have {SOCKET_PATH_MAX}; choose a shorter one with --state", path.display()
    )]
    TooLong {
        /// The directory.
        path: PathBuf,
        /// How many bytes too long.
        excess: usize,
    },
}

/// An agent's state directory, locked against other agents while this lives.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    _lock: Lock,
}

impl StateDir {
    /// Creates the directory if it does not exist, and locks it.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        let unusable = |source| StateError::Unusable { path: path.to_owned(), source };
        make(path)?;
        let path = path.canonicalize().map_err(unusable)?;
        let longest = path.as_os_str().len() + "/vms/".len() + NAME_LETTERS_MIN + QMP.len();
        if longest > SOCKET_PATH_MAX {
            return Err(StateError::TooLong { path, excess: longest - SOCKET_PATH_MAX });
        }
        let state = Self { _lock: lock(&path)?, path };
        for dir in [state.vms(), state.reports(), state.gangs()] {
            make(&dir)?;
        }
        // Sockets of an earlier run, at which nothing listens any more.
        match fs::remove_dir_all(state.scratch()) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(StateError::Unusable { path: state.scratch(), source });
            }
            _ => make(&state.scratch())?,
        }
        Ok(state)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn vms(&self) -> PathBuf {
        self.path.join("vms")
    }

    pub(crate) fn vm(&self, name: &str) -> PathBuf {
        self.vms().join(name)
    }

    pub(crate) fn reports(&self) -> PathBuf {
        self.path.join("reports")
    }

    pub(crate) fn gangs(&self) -> PathBuf {
        self.path.join("gangs")
    }

    pub(crate) fn journals(&self) -> PathBuf {
        self.path.join("journals")
    }

    pub(crate) fn domain_journals(&self) -> PathBuf {
        self.path.join("domains")
    }

    pub(crate) fn probes(&self) -> PathBuf {
        self.path.join("probes.json")
    }

    pub(crate) fn slowed(&self) -> PathBuf {
        self.path.join("slowed")
    }

    pub(crate) fn scratch(&self) -> PathBuf {
        self.path.join("run")
    }

    /// The longest name that a VM may have in this directory.
    pub(crate) fn name_letters_max(&self) -> usize {
        let used = self.vms().as_os_str().as_bytes().len() + "/".len() + QMP.len();
        SOCKET_PATH_MAX.saturating_sub(used)
    }
}

fn make(path: &Path) -> Result<(), StateError> {
    // Files in it give access to guests' memory.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| StateError::Unusable { path: path.to_owned(), source })
}

/// A lock that is released when this is dropped.
///
/// Closing the file alone would not do: a child process that is being started briefly has all open
/// files, and would keep the lock.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // If this fails, closing the file releases the lock.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn lock(state: &Path) -> Result<Lock, StateError> {
    let path = state.join("lock");
    let unusable = |source| StateError::Unusable { path: path.clone(), source };
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(unusable)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StateError::InUse(state.to_owned())),
        Err(errno) => Err(unusable(errno.into())),
    }
}

/// Replaces a file.
///
/// After a crash the file is entirely the old or the new one, and the new one once this has
/// returned. After an error it may be either.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    // A leftover would only take room, and a lack of room may be the cause of the error.
    write_durably(&new, bytes).and_then(|()| fs::rename(&new, path)).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })?;
    path.parent().map_or(Ok(()), flush)
}

fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file =
        OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes new entries of a directory survive a power failure.
pub(crate) fn flush(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_agents_cannot_share_one() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateDir::open(dir.path()).unwrap();
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::InUse(_))));
        drop(first);
        StateDir::open(dir.path()).unwrap();
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(90));
        let error = StateDir::open(&long).unwrap_err();
        assert!(error.to_string().contains("--state"), "{error}");
    }

    #[test]
    fn names_are_as_long_as_a_socket_allows() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let name = "n".repeat(state.name_letters_max());
        let longest = state.vm(&name).join("qmp");
        assert_eq!(longest.as_os_str().len(), SOCKET_PATH_MAX);
    }

    #[test]
    fn scratch_is_empty_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        fs::write(state.scratch().join("stale"), "x").unwrap();
        drop(state);
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(fs::read_dir(state.scratch()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // A failed replacement leaves nothing, and keeps the old file.
        fs::create_dir(dir.path().join("taken")).unwrap();
        replace(&dir.path().join("taken"), b"three").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
