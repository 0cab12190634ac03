//! The socket of the port for the helper in the guest.

use std::fs;
use std::path::PathBuf;

use super::words::Words;
use crate::guest_port::{NoPort, PORT_NAME};

/// The path of the socket, for the QEMU that has this process id.
pub(super) fn of(words: Words<'_>, pid: u32) -> Result<PathBuf, NoPort> {
    let is_it = |key: &str, wanted: &str| {
        let wanted = wanted.to_owned();
        let key = key.to_owned();
        move |one: &super::words::Argument<'_>| one.get(&key).as_deref() == Some(wanted.as_str())
    };
    let port = words.all("device").find(is_it("name", PORT_NAME)).ok_or(NoPort::Missing)?;
    let id = port.get("chardev").unwrap_or_default();
    let elsewhere = |leads_to: &str| NoPort::Elsewhere { leads_to: leads_to.to_owned() };
    let chardev = words.all("chardev").find(is_it("id", &id)).ok_or_else(|| elsewhere(&id))?;
    let socket = match (chardev.get("path"), chardev.get("fd")) {
        (Some(path), _) => Some(path.into()),
        (None, Some(fd)) => fd.parse().ok().and_then(|fd| listens_at(pid, fd)),
        (None, None) => None,
    };
    socket.ok_or_else(|| elsewhere(chardev.0))
}

/// Where the unix socket with this descriptor in a process listens: libvirt passes QEMU
/// an open socket.
fn listens_at(pid: u32, fd: u32) -> Option<PathBuf> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned();
    let table = fs::read_to_string(format!("/proc/{pid}/net/unix")).ok()?;
    path_in(&table, &inode)
}

/// The path in the kernel's list of unix sockets, whose lines end with inode and path.
fn path_in(table: &str, inode: &str) -> Option<PathBuf> {
    let path = |line: &str| {
        let mut rest = line;
        let mut fields = [""; 7];
        for field in &mut fields {
            let (one, more) = rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), ""));
            (*field, rest) = (one, more);
        }
        (fields[6] == inode && rest.starts_with('/')).then(|| PathBuf::from(rest))
    };
    table.lines().skip(1).find_map(path)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_was_handed_over_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a b.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let device = format!("virtserialport,chardev=c0,id=channel0,name={PORT_NAME}");
        let line = |chardev: &str| -> Vec<String> {
            ["qemu", "-chardev", chardev, "-device", &device].map(str::to_owned).to_vec()
        };
        let found = |chardev: &str| of(Words(&line(chardev)), std::process::id());
        let fd = listener.as_raw_fd();
        let handed_over = found(&format!("socket,id=c0,fd={fd},server=on,wait=off"));
        assert_eq!(handed_over.unwrap(), path);
        let named = found("socket,id=c0,path=/run/a,,b,server=on");
        assert_eq!(named.unwrap(), PathBuf::from("/run/a,b"));
        for other in ["pty,id=c0", "socket,id=c1,path=/run/a", "socket,id=c0,fd=9999"] {
            assert!(matches!(found(other), Err(NoPort::Elsewhere { .. })), "{other}");
        }
        let none = ["qemu", "-device", "virtserialport,name=org.qemu.guest_agent.0"];
        let none = none.map(str::to_owned);
        assert!(matches!(of(Words(&none), std::process::id()), Err(NoPort::Missing)));
    }
}
