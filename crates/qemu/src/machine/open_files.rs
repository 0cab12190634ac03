//! Files of another process: the sockets at which it listens, and where they are bound.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_acceptconn;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::monitor_names::known_as;
use crate::command_line::{Address, vnc_display};
use crate::process::{Process, proc_path};

/// A socket at which a process listens.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) at: At,
    pub(super) socket: OwnedFd,
}

/// Where a socket was bound.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum At {
    Path(PathBuf),
    Port(SocketAddr),
}

impl Open {
    /// Those of a process.
    pub(super) fn all(process: &Process) -> Vec<Self> {
        let entries = fs::read_dir(proc_path(process.pid(), "fd"));
        let entries = entries.into_iter().flatten().flatten();
        let is_socket = |path: &Path| {
            fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
        };
        let sockets = entries.filter(|entry| is_socket(&entry.path()));
        let numbers = sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter_map(|number| Self::take(process, number)).collect()
    }

    /// A process's open file of this number, if it is a socket that listens.
    pub(super) fn take(process: &Process, number: RawFd) -> Option<Self> {
        let file = take(process, number)?;
        if !socket_acceptconn(&file).ok()? {
            return None;
        }
        let unix = UnixListener::from(file);
        // An error if it is of another kind.
        if let Ok(address) = unix.local_addr() {
            let at = At::Path(address.as_pathname()?.to_owned());
            return Some(Self { at, socket: unix.into() });
        }
        let tcp = TcpListener::from(OwnedFd::from(unix));
        let at = At::Port(tcp.local_addr().ok()?);
        Some(Self { at, socket: tcp.into() })
    }
}

/// A process's open file of this number.
pub(super) fn take(process: &Process, number: RawFd) -> Option<OwnedFd> {
    // A command line may have any number.
    if number < 0 {
        return None;
    }
    pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty()).ok()
}

/// Where a process's listening socket is bound, as an option of `-chardev` has it.
pub(super) fn address_of(process: &Process, socket: RawFd) -> Option<String> {
    match Open::take(process, socket)?.at {
        At::Path(path) => {
            let path = known_as(&path).into_os_string().into_string().ok()?;
            Some(format!("path={}", path.replace(',', ",,")))
        }
        At::Port(address) => Some(format!("host={},port={}", address.ip(), address.port())),
    }
}

/// The same as the first part of `-vnc` has it.
pub(super) fn display_of(process: &Process, socket: RawFd) -> Option<String> {
    match Open::take(process, socket)?.at {
        At::Path(path) => Some(format!("unix:{}", path.to_str()?)),
        At::Port(address) => vnc_display(address),
    }
}

/// The sockets among these that listen at an address, each once: QEMU may have it open twice.
pub(super) fn at<'o>(open: &'o [Open], address: &Address, cwd: &Path) -> Vec<&'o Open> {
    let is_it = |one: &Open| match (&one.at, address) {
        (At::Path(bound), Address::Path(path)) => cwd.join(known_as(bound)) == cwd.join(path),
        (At::Port(bound), Address::Port(port)) => bound.port() == *port,
        _ => false,
    };
    let mut found: Vec<&Open> = Vec::new();
    for one in open {
        if is_it(one) && !found.iter().any(|other| other.at == one.at) {
            found.push(one);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn sockets_that_listen_are_found_with_their_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk");
        let listens = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let (connected, _other) = UnixStream::pair().unwrap();
        let me = Process::now(std::process::id()).unwrap();
        let at = |socket: RawFd| address_of(&me, socket);
        assert_eq!(at(listens.as_raw_fd()), Some(format!("path={}", path.display())));
        let bound = tcp.local_addr().unwrap();
        let expected = format!("host=127.0.0.1,port={}", bound.port());
        assert_eq!(at(tcp.as_raw_fd()), Some(expected));
        assert_eq!([at(connected.as_raw_fd()), at(-1)], [None, None]);
        let again = tcp.try_clone().unwrap();
        let all = Open::all(&me);
        let found = |address| super::at(&all, &address, Path::new("/"));
        let by_path = found(Address::Path(path.display().to_string()));
        let by_port = found(Address::Port(bound.port()));
        assert_eq!([by_path.len(), by_port.len()], [1, 1], "each is found once");
        drop((listens, tcp, again));
        // They are the same sockets.
        let client = UnixStream::connect(&path).unwrap();
        UnixListener::from(by_path[0].socket.try_clone().unwrap()).accept().unwrap();
        let other_client = TcpStream::connect(bound).unwrap();
        TcpListener::from(by_port[0].socket.try_clone().unwrap()).accept().unwrap();
        drop((client, other_client));
    }
}
