//! Owners of this host's TCP sockets.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::nic::NicError;
use crate::nic::sock_diag::{self, TcpSocket};

/// `TCP_ESTABLISHED` and `TCP_LISTEN`.
const ESTABLISHED: u8 = 0x01;
const LISTENING: u8 = 0x0a;

/// The user whose socket connects `local` with `remote`, as that socket sees them. None if there is
/// no such socket on this host, or it is closed.
///
/// # Errors
/// If the system refuses.
pub fn user_of(local: SocketAddr, remote: SocketAddr) -> Result<Option<u32>, NicError> {
    Ok(connection(local, remote)?.map(|socket| socket.uid))
}

/// The processes that hold the socket that connects `local` with `remote`, as that socket sees
/// them. Processes that the agent may not inspect are missing. Empty if this host has no such
/// socket.
///
/// # Errors
/// If the system refuses.
pub fn processes_of(local: SocketAddr, remote: SocketAddr) -> Result<Vec<u32>, NicError> {
    let Some(socket) = connection(local, remote)? else { return Ok(Vec::new()) };
    holders(socket.inode).map_err(|source| NicError::System {
        action: "finding the processes of a connection",
        source,
    })
}

/// The process that listens at `address`, if it is the only one and the agent may inspect it.
///
/// # Errors
/// If the system refuses.
pub fn listener_at(address: SocketAddr) -> Result<Option<u32>, NicError> {
    let Some(socket) = listener(address)? else { return Ok(None) };
    let holding = holders(socket.inode).map_err(|source| NicError::System {
        action: "finding the process that listens at an address",
        source,
    })?;
    let [pid] = holding[..] else { return Ok(None) };
    Ok(Some(pid))
}

/// Whether a connection to `address`, one of this host's, would reach a listener: for that address,
/// or for any.
///
/// # Errors
/// If the system refuses.
pub fn has_listener(address: SocketAddr) -> Result<bool, NicError> {
    Ok(listener(address)?.is_some())
}

/// A connection that a process still holds: the kernel shows a closed socket as root's.
fn connection(local: SocketAddr, remote: SocketAddr) -> Result<Option<TcpSocket>, NicError> {
    let is_held = |socket: &TcpSocket| socket.state == ESTABLISHED && socket.inode != 0;
    Ok(find(local, remote)?.filter(is_held))
}

fn listener(address: SocketAddr) -> Result<Option<TcpSocket>, NicError> {
    let nobody: SocketAddr = match address.ip().to_canonical().is_ipv4() {
        true => (Ipv4Addr::UNSPECIFIED, 0).into(),
        false => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    Ok(find(address, nobody)?.filter(|socket| socket.state == LISTENING))
}

fn find(local: SocketAddr, remote: SocketAddr) -> Result<Option<TcpSocket>, NicError> {
    sock_diag::find(local, remote)
        .map_err(|source| NicError::System { action: "finding the owner of a TCP socket", source })
}

/// The processes that have this socket open, without those that the agent may not inspect.
fn holders(inode: u32) -> io::Result<Vec<u32>> {
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
        assert!(has_listener(at).unwrap());
        drop((client, listener));
        assert_eq!(listener_at(at).unwrap(), None);
        assert!(!has_listener(at).unwrap());
    }

    /// The number of bytes that this thread has read from files.
    fn read_bytes() -> u64 {
        let text = fs::read_to_string("/proc/thread-self/io").unwrap();
        text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    /// A user of the host can open thousands of sockets.
    #[test]
    fn sockets_of_others_are_not_read() {
        const CONNECTIONS: usize = 300;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let connect = || (TcpStream::connect(at).unwrap(), listener.accept().unwrap());
        let connections: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
        let before = read_bytes();
        for (client, _) in &connections {
            let local = client.local_addr().unwrap();
            assert!(user_of(local, at).unwrap().is_some() && has_listener(at).unwrap());
        }
        let read = read_bytes() - before;
        assert!(read < 4096, "{read} bytes for {CONNECTIONS} connections");
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
