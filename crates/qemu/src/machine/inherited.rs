//! What a VM's next QEMU on the same host gets: RAM, listening sockets, and the PID file.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_acceptconn;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::inherit_error::InheritError;
use super::monitor_names::{NextName, known_as};
use super::shared_ram::SharedRam;
use super::taps::NextTaps;
use super::{Machine, StartError, pid_file, vnc};
use crate::command_line::{Address, CommandLine, Listening, vnc_display};
use crate::process::{Process, proc_path};

/// What a VM's next QEMU gets from its former one.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Where ports of the guest, monitors and the VNC server listen, and the PID file.
    pub sockets: InheritedSockets,
    /// RAM that stays where it is; other RAM is new.
    pub ram: SharedRam,
    /// For taps that the former one has until it ends.
    pub taps: NextTaps,
}

impl Inherited {
    /// The command line for that QEMU.
    pub(super) fn put_in(&self, line: &CommandLine, made: &MadeSockets<'_>) -> CommandLine {
        let line = made.put_in(line).appending().with_mapped_ram(&self.ram.numbers());
        line.with_tap_files(&self.taps.numbers())
    }

    /// All files, besides those for sockets.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ram.borrowed().chain(self.taps.borrowed())
    }
}

/// What a VM's QEMU listens at, in the order of its command line, and its PID file.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<Socket>,
    /// Those of its VNC server.
    vnc: Vec<OwnedFd>,
    /// None if it has none that it still writes to.
    pid_file: Option<File>,
}

/// A socket for the next QEMU.
#[derive(Debug)]
enum Socket {
    /// That of the former one.
    Same(OwnedFd),
    /// Another one, which gets the name of the former one's.
    New(NextName),
}

impl InheritedSockets {
    /// Those of this QEMU. Nothing of it changes.
    ///
    /// # Errors
    /// If one of those on its command line is not found, or can't be handed over.
    pub fn of(machine: &Machine) -> Result<Self, InheritError> {
        // A command line that can't be used has none.
        let Ok(line) = CommandLine::parse(&machine.argv) else { return Ok(Self::default()) };
        let pid_file = match line.pid_file() {
            Some(path) => pid_file::open_in(&machine.process, &machine.cwd.join(path))?,
            None => None,
        };
        let (listening, vnc) = (line.inherited_sockets(), line.vnc_address());
        if listening.is_empty() && vnc.is_none() {
            return Ok(Self { pid_file, ..Self::default() });
        }
        let open = Open::all(&machine.process);
        let sockets = listening.iter().map(|one| socket(machine, one, &open));
        let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
        let vnc = match vnc {
            Some(address) => vnc_sockets(machine, &address, &open)?,
            None => Vec::new(),
        };
        Ok(Self { sockets, vnc, pid_file })
    }

    /// Makes what one start of the next QEMU takes, which has `home` for itself.
    pub(super) fn make(&self, home: &Path) -> Result<MadeSockets<'_>, StartError> {
        let mut made = MadeSockets { of: self, sockets: Vec::new(), vnc_dir: None };
        match made.fill(home) {
            Ok(()) => Ok(made),
            Err(error) => {
                made.remove();
                Err(error)
            }
        }
    }
}

/// What one start of a next QEMU inherits.
pub(super) struct MadeSockets<'a> {
    of: &'a InheritedSockets,
    sockets: Vec<OwnedFd>,
    /// Where its VNC server listens until it has the VM.
    vnc_dir: Option<OwnedFd>,
}

impl MadeSockets<'_> {
    fn fill(&mut self, home: &Path) -> Result<(), StartError> {
        for socket in &self.of.sockets {
            let made = match socket {
                Socket::Same(socket) => socket.try_clone().map_err(|source| (home, source)),
                Socket::New(name) => name.make().map_err(|source| (name.path(), source)),
            };
            let made = made.map_err(|(path, source)| {
                let path = path.to_owned();
                StartError::Socket { path, source }
            })?;
            self.sockets.push(made);
        }
        if !self.of.vnc.is_empty() {
            let directory = |source| StartError::Directory { path: home.to_owned(), source };
            self.vnc_dir = Some(vnc::make_dir(home).map_err(directory)?);
        }
        Ok(())
    }

    /// The command line of that QEMU.
    pub(super) fn put_in(&self, line: &CommandLine) -> CommandLine {
        let numbers = |sockets: &[OwnedFd]| -> Vec<RawFd> {
            sockets.iter().map(AsRawFd::as_raw_fd).collect()
        };
        let line = line.with_inherited_sockets(&numbers(&self.sockets)).without_pid_file();
        match &self.vnc_dir {
            Some(dir) => line.with_vnc_until(dir.as_raw_fd(), &numbers(&self.of.vnc)),
            None => line,
        }
    }

    /// All of it.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = self.sockets.iter().chain(&self.of.vnc).chain(&self.vnc_dir);
        sockets.map(AsFd::as_fd).chain(self.of.pid_file.iter().map(AsFd::as_fd))
    }

    /// Removes the names of what was made, for a QEMU that has not started.
    pub(super) fn remove(&self) {
        for socket in &self.of.sockets {
            if let Socket::New(name) = socket {
                name.remove();
            }
        }
    }
}

/// The socket that the next QEMU has for one of the former one's.
fn socket(machine: &Machine, one: &Listening, open: &[Open]) -> Result<Socket, InheritError> {
    let found = at(open, &one.address, &machine.cwd);
    let first = match (&found[..], &one.address) {
        ([first], _) => first,
        ([_, _, ..], Address::Port(port)) => {
            let pid = machine.process.pid();
            return Err(InheritError::SeveralAddresses { port: *port, pid });
        }
        _ => return Err(not_found(machine, &one.address)),
    };
    match &first.at {
        At::Path(path) if one.commands => {
            let path = machine.cwd.join(path);
            let next = NextName::next_to(&path, machine.process.pid());
            next.map(Socket::New)
                .map_err(|why| InheritError::Monitor { path: known_as(&path), why })
        }
        _ => {
            let same = first.socket.try_clone().map_err(|_| not_found(machine, &one.address))?;
            Ok(Socket::Same(same))
        }
    }
}

/// The sockets of the VNC server.
fn vnc_sockets(
    machine: &Machine,
    address: &Address,
    open: &[Open],
) -> Result<Vec<OwnedFd>, InheritError> {
    let not_found = || not_found(machine, address);
    let found = at(open, address, &machine.cwd);
    if found.is_empty() {
        return Err(not_found());
    }
    found.iter().map(|one| one.socket.try_clone().map_err(|_| not_found())).collect()
}

fn not_found(machine: &Machine, address: &Address) -> InheritError {
    let at = match address {
        Address::Path(path) => path.clone(),
        Address::Port(port) => format!("of port {port}"),
    };
    InheritError::NotFound { at, pid: machine.process.pid() }
}

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
fn at<'o>(open: &'o [Open], address: &Address, cwd: &Path) -> Vec<&'o Open> {
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
