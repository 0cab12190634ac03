//! The listening sockets of a VM's QEMU, for its next QEMU on the same host.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_acceptconn;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Machine;
use crate::command_line::CommandLine;
use crate::process::{Process, proc_path};

/// Why a VM's next QEMU can't inherit a socket, or a file with RAM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InheritError {
    /// QEMU has no such socket, or the agent may not take it.
    #[error(
        "the socket {path} can't be handed over: its QEMU, process {pid}, has none that listens \
         there, or the agent may not inspect that process"
    )]
    NotFound {
        /// Its path.
        path: String,
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has not mapped such a file, or the agent may not open it.
    #[error(
        "the file of its RAM {id} can't be handed over: its QEMU, process {pid}, has none open \
         that it maps as shared memory, or the agent may not inspect that process"
    )]
    NoRamFile {
        /// Its backend.
        id: String,
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has ended.
    #[error("its QEMU, process {pid}, has ended")]
    Exited {
        /// QEMU's process.
        pid: u32,
    },
}

/// Listening sockets that a VM's QEMU has open, in the order of its command line.
#[derive(Debug, Default)]
pub struct InheritedSockets(Vec<UnixListener>);

impl InheritedSockets {
    /// Those of this QEMU. Nothing of it changes.
    ///
    /// # Errors
    /// If one of those on its command line is not found.
    pub fn of(machine: &Machine) -> Result<Self, InheritError> {
        // A command line that can't be used has none.
        let Ok(line) = CommandLine::parse(&machine.argv) else { return Ok(Self::default()) };
        let paths = line.inherited_sockets();
        if paths.is_empty() {
            return Ok(Self::default());
        }
        let open: Vec<(PathBuf, UnixListener)> = listening(&machine.process);
        let taken = paths.into_iter().map(|path| {
            let named = machine.cwd.join(&path);
            let is_it = |(bound, _): &&(PathBuf, _)| machine.cwd.join(bound) == named;
            let found = open.iter().find(is_it).and_then(|(_, socket)| socket.try_clone().ok());
            let pid = machine.process.pid();
            found.ok_or(InheritError::NotFound { path, pid })
        });
        taken.collect::<Result<_, _>>().map(Self)
    }

    /// Their numbers.
    pub(super) fn numbers(&self) -> Vec<RawFd> {
        self.0.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// All of them.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

/// The path of a process's listening socket, as it was bound.
pub(super) fn path_of(process: &Process, socket: RawFd) -> Option<String> {
    let (path, _) = take(process, socket)?;
    path.into_os_string().into_string().ok()
}

/// The unix sockets at which a process listens.
fn listening(process: &Process) -> Vec<(PathBuf, UnixListener)> {
    let entries = fs::read_dir(proc_path(process.pid(), "fd"));
    let entries = entries.into_iter().flatten().flatten();
    let is_socket = |path: &Path| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let sockets = entries.filter(|entry| is_socket(&entry.path()));
    let numbers = sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(|number| take(process, number)).collect()
}

/// A process's open file of this number, if it is a unix socket that listens, and its path.
fn take(process: &Process, number: RawFd) -> Option<(PathBuf, UnixListener)> {
    // A command line may have any number.
    if number < 0 {
        return None;
    }
    let file = pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty()).ok()?;
    if !socket_acceptconn(&file).ok()? {
        return None;
    }
    let listener = UnixListener::from(file);
    // An error if it is of another kind.
    let path = listener.local_addr().ok()?.as_pathname()?.to_owned();
    Some((path, listener))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn sockets_that_listen_are_found_with_their_paths() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk");
        let listens = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let (connected, _other) = UnixStream::pair().unwrap();
        let me = Process::now(std::process::id()).unwrap();
        assert_eq!(path_of(&me, listens.as_raw_fd()).as_deref(), path.to_str());
        for other in [tcp.as_raw_fd(), connected.as_raw_fd(), -1] {
            assert_eq!(path_of(&me, other), None);
        }
        let found = listening(&me).into_iter().find(|(bound, _)| *bound == path).unwrap();
        drop(listens);
        // It is the same socket.
        let client = UnixStream::connect(&path).unwrap();
        found.1.accept().unwrap();
        drop(client);
    }
}
