//! Owners of this host's TCP sockets, from the kernel's list.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::NicError;

/// `TCP_ESTABLISHED` and `TCP_LISTEN`.
const ESTABLISHED: u8 = 0x01;
const LISTENING: u8 = 0x0a;

/// A line of that list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    uid: u32,
    inode: u64,
}

impl Line {
    /// Whether it connects `local` with `remote` and a process still holds it: the kernel lists a
    /// closed socket as root's.
    fn connects(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        let (local, remote) = (unmapped(local), unmapped(remote));
        let is_held = self.state == ESTABLISHED && self.inode != 0;
        is_held && self.local == local && self.remote == remote
    }
}

/// The user whose socket connects `local` with `remote`, as that socket sees them. None if there is
/// no such socket on this host, or it is closed.
///
/// # Errors
/// If the system refuses.
pub fn user_of(local: SocketAddr, remote: SocketAddr) -> Result<Option<u32>, NicError> {
    Ok(lines(local)?.find(|line| line.connects(local, remote)).map(|line| line.uid))
}

/// The processes that hold the socket that connects `local` with `remote`, as that socket sees
/// them. Processes that the agent may not inspect are missing. Empty if this host has no such
/// socket.
///
/// # Errors
/// If the system refuses.
pub fn processes_of(local: SocketAddr, remote: SocketAddr) -> Result<Vec<u32>, NicError> {
    let Some(line) = lines(local)?.find(|line| line.connects(local, remote)) else {
        return Ok(Vec::new());
    };
    holders(line.inode).map_err(|source| NicError::System {
        action: "looking for the processes of a connection",
        source,
    })
}

/// The process that listens at `address`, if it is the only one and the agent may inspect it.
///
/// # Errors
/// If the system refuses.
pub fn listener_at(address: SocketAddr) -> Result<Option<u32>, NicError> {
    let address = unmapped(address);
    let is_it = |line: &Line| {
        let hears = line.local.ip() == address.ip() || line.local.ip().is_unspecified();
        line.state == LISTENING && hears && line.local.port() == address.port()
    };
    // A listener for exactly this address takes precedence over one for any address, and that over
    // one for any address of both families, which may be for IPv6 only: the list doesn't say.
    let rank = |line: &Line| (line.local.ip().is_unspecified(), line.local.is_ipv6());
    let found = lines(address)?.filter(is_it).min_by_key(rank);
    let Some(line) = found else { return Ok(None) };
    let holding = holders(line.inode).map_err(|source| NicError::System {
        action: "looking for the process that listens at an address",
        source,
    })?;
    let [pid] = holding[..] else { return Ok(None) };
    Ok(Some(pid))
}

/// Sockets that packets to or from addresses like this one may belong to. For IPv4 these are also
/// IPv6 sockets: of a mapped address, or of any.
fn lines(like: SocketAddr) -> Result<impl Iterator<Item = Line>, NicError> {
    let reading = |source| NicError::System { action: "reading the list of TCP sockets", source };
    let is_four = unmapped(like).is_ipv4();
    let mut lines = Vec::new();
    if is_four {
        lines = table("tcp").map_err(reading)?;
    }
    // Without IPv6, the kernel has no such list.
    let six = match table("tcp6") {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        six => six.map_err(reading)?,
    };
    let may_be = |line: &Line| match is_four {
        true => line.local.is_ipv4() || line.local.ip().is_unspecified(),
        false => line.local.is_ipv6(),
    };
    lines.extend(six.into_iter().filter(may_be));
    Ok(lines.into_iter())
}

/// One of the kernel's lists, for the calling thread's network namespace.
fn table(name: &str) -> io::Result<Vec<Line>> {
    let text = fs::read_to_string(format!("/proc/thread-self/net/{name}"))?;
    Ok(text.lines().filter_map(parse).collect())
}

/// An IPv4 address that is mapped to IPv6, as IPv4; any other as it is.
fn unmapped(address: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(six) = address else { return address };
    six.ip().to_ipv4_mapped().map_or(address, |four| (four, six.port()).into())
}

fn parse(line: &str) -> Option<Line> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let local = unmapped(address(words.next()?)?);
    let remote = unmapped(address(words.next()?)?);
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    let uid = words.nth(3)?.parse().ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    Some(Line { local, remote, state, uid, inode })
}

/// Parses an address: 32-bit words in the processor's byte order, in hex, and a port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match ip.len() {
        8 => Some((Ipv4Addr::from(word(0)?), port).into()),
        32 => {
            let mut bytes = [0; 16];
            for (nth, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(8 * nth)?);
            }
            Some((Ipv6Addr::from(bytes), port).into())
        }
        _ => None,
    }
}

/// The processes that have this socket open, without those that the agent may not inspect.
fn holders(inode: u64) -> io::Result<Vec<u32>> {
    let wanted = format!("socket:[{inode}]");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // The process may have ended.
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
        if links.into_iter().any(|link| link.as_os_str() == wanted.as_str()) {
            found.push(pid);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn lines_are_understood() {
        let line = "   1: 0200077F:C000 00000000:0000 0A 00000000:00000000 00:00000000 00000000 \
                    64055        0 123456 1 ffff8881 100 0 0 10 0";
        let expected = Line {
            local: "127.7.0.2:49152".parse().unwrap(),
            remote: "0.0.0.0:0".parse().unwrap(),
            state: LISTENING,
            uid: 64055,
            inode: 123_456,
        };
        assert_eq!(parse(line), Some(expected));
        let six = address("B80D01200000000067452301EFCDAB89:1F90").unwrap();
        assert_eq!(six, "[2001:db8::123:4567:89ab:cdef]:8080".parse().unwrap());
        for nonsense in ["", "  sl  local_address rem_address", "1: 0:0 0:0 0A", "1: zz:1"] {
            assert_eq!(parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn our_own_sockets_are_ours() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let client = TcpStream::connect(at).unwrap();
        let (from, to) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let us = rustix::process::geteuid().as_raw();
        assert_eq!(user_of(from, to).unwrap(), Some(us));
        assert_eq!(user_of(from, "127.0.0.1:9".parse().unwrap()).unwrap(), None);
        // A socket that is closed while the other end is open has no owner, not root.
        let other = TcpStream::connect(at).unwrap();
        let closed = (other.local_addr().unwrap(), at);
        drop(other);
        assert_eq!(user_of(closed.0, closed.1).unwrap(), None);
        assert_eq!(processes_of(from, to).unwrap(), [std::process::id()]);
        assert!(processes_of(from, "127.0.0.1:9".parse().unwrap()).unwrap().is_empty());
        // A process can inspect its own files even without privileges.
        assert_eq!(listener_at(at).unwrap(), Some(std::process::id()));
        drop((client, listener));
        assert_eq!(listener_at(at).unwrap(), None);
    }

    /// IPv4 clients of an IPv6 socket see it at their own kind of address.
    #[test]
    fn ipv4_addresses_lead_to_ipv6_sockets_too() {
        let us = Some(std::process::id());
        // The standard library's listeners take both families.
        let any = TcpListener::bind("[::]:0").unwrap();
        let port = any.local_addr().unwrap().port();
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        assert_eq!(listener_at(at).unwrap(), us);
        assert_eq!(listener_at((Ipv6Addr::LOCALHOST, port).into()).unwrap(), us);
        let client = TcpStream::connect(at).unwrap();
        let (accepted, from) = any.accept().unwrap();
        assert!(from.is_ipv6(), "{from}");
        // As either end sees the two sockets.
        assert!(user_of(accepted.local_addr().unwrap(), from).unwrap().is_some());
        assert!(user_of(at, client.local_addr().unwrap()).unwrap().is_some());
        assert!(user_of(from, accepted.local_addr().unwrap()).unwrap().is_some());

        let mapped = TcpListener::bind("[::ffff:127.0.0.1]:0").unwrap();
        let at = mapped.local_addr().unwrap();
        assert_eq!(listener_at(at).unwrap(), us);
        assert_eq!(listener_at((Ipv4Addr::LOCALHOST, at.port()).into()).unwrap(), us);
        assert_eq!(listener_at((Ipv6Addr::LOCALHOST, at.port()).into()).unwrap(), None);
    }
}
