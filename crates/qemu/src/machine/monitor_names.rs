//! The sockets of a VM's monitors, for its next QEMU on the same host.
//!
//! A client could order a QEMU to run before it has the VM. So the next one listens at another
//! socket, next to the former one's and with the same rights, under a hidden name that no client
//! knows. Once that QEMU has the VM, its socket gets the name of the former one's.
//!
//! Names are used within a directory that was opened, and only for sockets of QEMU's user: a path
//! may lead elsewhere by now, and the agent has more rights than QEMU.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind::ConnectionRefused};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use host::rights::User;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::Machine;
use super::open_files::{At, Open};
use crate::command_line::{Address, CommandLine, name_after, name_until};
use crate::process::user_of;
use crate::socket;

/// Clients that may wait until QEMU accepts them.
const BACKLOG: i32 = 16;
/// How long it takes at most to find that nothing listens.
const LEFT_MAX: Duration = Duration::from_secs(1);
/// The longest path of a socket.
const PATH_MAX: usize = 107;

/// A monitor's socket that is to be made for a next QEMU.
#[derive(Debug)]
pub(super) struct NextName {
    dir: OwnedFd,
    name: String,
    path: PathBuf,
    /// The rights of the present one.
    mode: u32,
    owner: (Uid, Gid),
}

impl NextName {
    /// Next to the one that the QEMU with this process has bound to this path. Nothing is made.
    pub(super) fn next_to(bound: &Path, pid: u32) -> Result<Self, String> {
        let present = known_as(bound);
        let (dir, [present_name, bound_name]) = opened(&present, [&present, bound])?;
        let uid = user_of(pid).map_err(|error| error.to_string())?.uid;
        let stat = rustix::fs::statat(&dir, &*present_name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(|error| io::Error::from(error).to_string())?;
        let mode = stat.st_mode;
        if FileType::from_raw_mode(mode) != FileType::Socket || stat.st_uid != uid {
            return Err(format!("it is no socket of the user with the id {uid}, as QEMU has"));
        }
        let name = name_until(&bound_name);
        let path = present.with_file_name(&name);
        if path.as_os_str().len() > PATH_MAX {
            return Err(format!("{} would be too long", path.display()));
        }
        let owner = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        Ok(Self { dir, name, path, mode: mode & 0o777, owner })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, with the rights of the present one.
    pub(super) fn make(&self) -> io::Result<OwnedFd> {
        // An earlier upgrade may have left one.
        self.remove();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&self.path)?)?;
        self.give_rights().inspect_err(|_| self.remove())?;
        // No client before it has its rights.
        rustix::net::listen(&socket, BACKLOG).inspect_err(|_| self.remove())?;
        Ok(socket)
    }

    fn give_rights(&self) -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, &*self.name, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (uid, gid) = self.owner;
        rustix::fs::chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
        let file = format!("/proc/self/fd/{}", file.as_raw_fd());
        fs::set_permissions(file, Permissions::from_mode(self.mode))
    }

    pub(super) fn remove(&self) {
        remove(self.dir.as_fd(), &self.name, self.owner.0);
    }
}

/// Gives the sockets of this QEMU's monitors the names by which clients know them, and removes what
/// was made for another QEMU. It has to be the VM's only one.
pub(super) fn take_names(machine: &Machine, line: &CommandLine) -> Result<(), String> {
    let mut monitors = line.inherited_sockets();
    monitors.retain(|one| one.commands);
    if monitors.is_empty() {
        return Ok(());
    }
    let uid = user_of(machine.process.pid()).map_err(|error| error.to_string())?.uid;
    let open = Open::all(&machine.process);
    let mut taken = Ok(());
    for monitor in monitors {
        let Address::Path(path) = &monitor.address else { continue };
        let known = machine.cwd.join(path);
        let bound = open.iter().find_map(|one| match &one.at {
            At::Path(path) => Some(machine.cwd.join(path)).filter(|one| known_as(one) == known),
            At::Port(_) => None,
        });
        let Some(bound) = bound else { continue };
        // The others get theirs.
        taken = taken.and(take_name(&known, &bound, Uid::from_raw(uid)));
    }
    taken
}

fn take_name(known: &Path, bound: &Path, uid: Uid) -> Result<(), String> {
    let (dir, [name, bound]) = opened(known, [known, bound])?;
    let dir = dir.as_fd();
    if name != bound && is_socket_of(dir, &bound, uid) == Some(true) {
        if is_socket_of(dir, &name, uid) == Some(false) {
            return Err(format!("{} is something else by now", known.display()));
        }
        rustix::fs::renameat(dir, &*bound, dir, &*name)
            .map_err(|error| format!("{}: {}", known.display(), io::Error::from(error)))?;
    }
    remove(dir, &name_until(&bound), uid);
    Ok(())
}

/// Removes the names of monitors' sockets at which nothing listens any more. QEMU, which was this
/// user's, removes only names to which it was bound.
pub(super) fn remove_names(machine: &Machine, line: &CommandLine, user: &User) {
    for path in paths(machine, line).filter(|path| is_left(path)) {
        if let Ok((dir, [name, _])) = opened(&path, [&path, &path]) {
            remove(dir.as_fd(), &name, Uid::from_raw(user.uid));
        }
    }
}

/// Removes hidden names at which nothing listens any more: those of a QEMU that has exited before
/// its sockets had the names of the former one's.
pub(super) fn remove_hidden_names(machine: &Machine, line: &CommandLine) {
    paths(machine, line).for_each(|known| remove_hidden(&known));
}

fn remove_hidden(known: &Path) {
    let Some(name) = known.file_name().and_then(OsStr::to_str) else { return };
    let first = name_until(name);
    for hidden in [name_until(&first), first] {
        let hidden = known.with_file_name(hidden);
        if is_left(&hidden)
            && let Ok((dir, [name, _])) = opened(&hidden, [&hidden, &hidden])
            && let Some(owner) = owner_of(dir.as_fd(), &name)
        {
            remove(dir.as_fd(), &name, owner);
        }
    }
}

/// Where clients find the monitors.
fn paths(machine: &Machine, line: &CommandLine) -> impl Iterator<Item = PathBuf> {
    let monitors = line.inherited_sockets().into_iter().filter(|one| one.commands);
    monitors.filter_map(|monitor| match &monitor.address {
        Address::Path(path) => Some(machine.cwd.join(path)),
        Address::Port(..) => None,
    })
}

/// Whether there is a socket at which nothing listens any more.
fn is_left(path: &Path) -> bool {
    socket::connect(path, LEFT_MAX).is_err_and(|error| error.kind() == ConnectionRefused)
}

/// The path by which clients know a socket that is bound to this one.
pub(super) fn known_as(bound: &Path) -> PathBuf {
    match bound.file_name().and_then(OsStr::to_str) {
        Some(name) => bound.with_file_name(name_after(name)),
        None => bound.to_owned(),
    }
}

/// The directory of a path, and the names of paths in it.
fn opened(path: &Path, names: [&Path; 2]) -> Result<(OwnedFd, [String; 2]), String> {
    let name = |path: &Path| path.file_name().and_then(OsStr::to_str).map(str::to_owned);
    let [first, second] = names.map(name);
    let (Some(dir), Some(first), Some(second)) = (path.parent(), first, second) else {
        return Err(format!("{} is not a path for a socket", path.display()));
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())
        .map_err(|error| format!("{}: {}", dir.display(), io::Error::from(error)))?;
    Ok((dir, [first, second]))
}

/// Whether there is a socket of that user with this name; none if there is nothing.
fn is_socket_of(dir: BorrowedFd<'_>, name: &str, uid: Uid) -> Option<bool> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    Some(is_socket && stat.st_uid == uid.as_raw())
}

fn owner_of(dir: BorrowedFd<'_>, name: &str) -> Option<Uid> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(Uid::from_raw(stat.st_uid))
}

/// Removes a socket of that user, if there is one.
fn remove(dir: BorrowedFd<'_>, name: &str, uid: Uid) {
    if is_socket_of(dir, name, uid) == Some(true)
        && let Err(error) = rustix::fs::unlinkat(dir, name, AtFlags::empty())
    {
        tracing::warn!(socket = name, %error, "cannot remove a socket that was made for a monitor");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_monitors_next_socket_gets_its_name_later() {
        let dir = tempfile::tempdir().unwrap();
        let known = dir.path().join("web1.qmp");
        let former = UnixListener::bind(&known).unwrap();
        fs::set_permissions(&known, Permissions::from_mode(0o640)).unwrap();
        let me = std::process::id();
        let uid = rustix::process::geteuid();
        let mut bound = known.clone();
        for turn in ["0", "1", "0"] {
            let next = NextName::next_to(&bound, me).unwrap();
            assert_eq!(names(dir.path()), ["web1.qmp"], "nothing is made yet");
            // What an earlier one has left is replaced.
            drop(next.make().unwrap());
            let socket = UnixListener::from(next.make().unwrap());
            let hidden = format!(".web1.qmp.droveway-{turn}");
            assert_eq!(names(dir.path()), [&*hidden, "web1.qmp"]);
            bound = dir.path().join(&hidden);
            // Also if it is repeated after a crash.
            for _ in 0..2 {
                take_name(&known, &bound, uid).unwrap();
                assert_eq!(names(dir.path()), ["web1.qmp"]);
            }
            let mode = fs::metadata(&known).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o640);
            let client = UnixStream::connect(&known).unwrap();
            socket.accept().unwrap();
            drop(client);
            assert_eq!(known_as(&bound), known);
        }
        drop(former);
    }

    #[test]
    fn the_former_one_keeps_its_name_if_it_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let known = dir.path().join("web1.qmp");
        let former = UnixListener::bind(&known).unwrap();
        let next = NextName::next_to(&known, std::process::id()).unwrap();
        drop(next.make().unwrap());
        take_name(&known, &known, rustix::process::geteuid()).unwrap();
        assert_eq!(names(dir.path()), ["web1.qmp"]);
        let client = UnixStream::connect(&known).unwrap();
        former.accept().unwrap();
        drop(client);
    }

    #[test]
    fn hidden_names_are_removed_when_nothing_listens_there() {
        let dir = tempfile::tempdir().unwrap();
        let known = dir.path().join("web1.qmp");
        let _former = UnixListener::bind(&known).unwrap();
        let next = NextName::next_to(&known, std::process::id()).unwrap();
        let socket = next.make().unwrap();
        let hidden = name_until("web1.qmp");
        let other = name_until(&hidden);
        drop(UnixListener::bind(dir.path().join(&other)).unwrap());
        remove_hidden(&known);
        assert_eq!(names(dir.path()), [&*hidden, "web1.qmp"]);
        drop(socket);
        remove_hidden(&known);
        assert_eq!(names(dir.path()), ["web1.qmp"]);
        fs::write(dir.path().join(&hidden), "a file").unwrap();
        remove_hidden(&known);
        assert_eq!(names(dir.path()), [&*hidden, "web1.qmp"]);
    }

    #[test]
    fn what_is_no_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let known = dir.path().join("web1.qmp");
        fs::write(&known, "a file").unwrap();
        let error = NextName::next_to(&known, std::process::id()).unwrap_err();
        assert!(error.contains("no socket of the user"), "{error}");
        let hidden = dir.path().join(name_until("web1.qmp"));
        let _other = UnixListener::bind(&hidden).unwrap();
        let error = take_name(&known, &hidden, rustix::process::geteuid()).unwrap_err();
        assert!(error.contains("something else"), "{error}");
        assert_eq!(fs::read_to_string(&known).unwrap(), "a file");
        let long = dir.path().join("m".repeat(PATH_MAX - dir.path().as_os_str().len() - 1));
        let _long = UnixListener::bind(&long).unwrap();
        let error = NextName::next_to(&long, std::process::id()).unwrap_err();
        assert!(error.contains("too long"), "{error}");
    }
}
