//! What a VM's next QEMU on the same host gets: RAM, listening sockets, and the PID file.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use super::inherit_error::InheritError;
use super::monitor_names::{NextName, known_as};
use super::open_files::{At, Open, at};
use super::shared_ram::SharedRam;
use super::taps::NextTaps;
use super::{Machine, StartError, pid_file, vnc};
use crate::command_line::{Address, CommandLine, Listening};

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
