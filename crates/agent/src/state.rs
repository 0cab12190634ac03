//! The state directory: what of an agent must survive it.
//!
//! ```text
//! STATE/lock              held by the agent that runs
//! STATE/vms/NAME/         one VM: record.json, qmp, qemu.log
//! STATE/reports/ID.json   one ended migration
//! STATE/gangs/ID.json     one gang that this agent coordinates, or did
//! STATE/journals/         switchovers that are not over
//! STATE/slowed/           VMs that are slowed, to be let go after a crash
//! STATE/run/              sockets of migrations that run; emptied at start
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

/// The kernel's limit for a unix socket's path, without the final zero.
pub(crate) const SOCKET_PATH_MAX: usize = 107;
/// What comes after a VM's directory in the path of its QMP socket.
const QMP: &str = "/qmp";
/// A state directory that leaves less than this for names is refused.
const NAME_LETTERS_MIN: usize = 16;

/// Why a state directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It can't be made or read.
    #[error("the state directory {}: {source}", path.display())]
    Unusable {
        /// Which file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another agent has it.
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
        /// How much too long.
        excess: usize,
    },
}

/// An agent's state directory; no other agent uses it while this lives.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    _lock: Lock,
}

impl StateDir {
    /// Makes it if need be, and takes it.
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
        // Sockets of a run that ended; nobody listens there any more.
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

    pub(crate) fn probes(&self) -> PathBuf {
        self.path.join("probes.json")
    }

    pub(crate) fn slowed(&self) -> PathBuf {
        self.path.join("slowed")
    }

    pub(crate) fn scratch(&self) -> PathBuf {
        self.path.join("run")
    }

    /// How long a VM's name may be here.
    pub(crate) fn name_letters_max(&self) -> usize {
        let used = self.vms().as_os_str().as_bytes().len() + "/".len() + QMP.len();
        SOCKET_PATH_MAX.saturating_sub(used)
    }
}

fn make(path: &Path) -> Result<(), StateError> {
    // Memory of guests can be reached through what lies here.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| StateError::Unusable { path: path.to_owned(), source })
}

/// A lock that goes with whoever took it. Were it left to the end of the file, a
/// child that is being started, and has all files for a moment, would keep it.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // It goes with the file at the latest.
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

/// Replaces a file: after a crash it is the old one or the new one, whole, and the
/// new one once this has returned. After an error it may be either.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    // What is left of it would only take room, where room may be what is missing.
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

/// What was made in a directory stays there, also after a failure of power.
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
        // Nothing of one that fails is left, and the old one is.
        fs::create_dir(dir.path().join("taken")).unwrap();
        replace(&dir.path().join("taken"), b"three").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
