//! Requests to the kernel for one TCP socket (`NETLINK_SOCK_DIAG`).
//!
//! A request has one reply, however many sockets there are. `/proc/net/tcp` lists all of them, and
//! any user of the host can open thousands.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// `SOCK_DIAG_BY_FAMILY`, the type of requests and replies.
const BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR`.
const ERROR: u16 = 2;
/// `NLM_F_REQUEST`. Without `NLM_F_DUMP` it is for one socket.
const REQUEST: u16 = 1;
/// `IPPROTO_TCP`.
const TCP: u8 = 6;
/// `INET_DIAG_NOCOOKIE`: whichever socket has these addresses.
const ANY_COOKIE: [u8; 8] = [0xff; 8];

/// `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;
/// The header and `struct inet_diag_req_v2`.
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
/// Offsets in a reply: of its type, of an error's number, and of fields of `struct inet_diag_msg`.
const TYPE_AT: usize = 4;
const ERRNO_AT: usize = HEADER_BYTES;
const STATE_AT: usize = HEADER_BYTES + 1;
const UID_AT: usize = HEADER_BYTES + 64;
const INODE_AT: usize = HEADER_BYTES + 68;
/// A reply without the attributes that follow.
const REPLY_BYTES: usize = INODE_AT + 4;

/// A TCP socket of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpSocket {
    pub(crate) state: u8,
    pub(crate) uid: u32,
    /// 0 once no process has it open.
    pub(crate) inode: u32,
}

/// The socket to which packets from `remote` to `local` belong, if there is one: a connection, or
/// what listens there.
pub(crate) fn find(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<TcpSocket>> {
    let Some(request) = request_for(unmapped(local), unmapped(remote)) else { return Ok(None) };
    match exchange(&open()?, &request) {
        Err(error) if error.kind() == ErrorKind::NotFound => match is_available()? {
            true => Ok(None),
            false => Err(io::Error::new(
                ErrorKind::Unsupported,
                "the kernel's module tcp_diag is missing",
            )),
        },
        found => found.map(Some),
    }
}

/// Whether the kernel can reply. Without its module, it does as if there were no sockets.
fn is_available() -> io::Result<bool> {
    static IS_AVAILABLE: AtomicBool = AtomicBool::new(false);
    if !IS_AVAILABLE.load(Relaxed) {
        let known = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let request = request_for(known.local_addr()?, (Ipv4Addr::UNSPECIFIED, 0).into());
        let kernel = open()?;
        let finds = request.is_some_and(|request| exchange(&kernel, &request).is_ok());
        IS_AVAILABLE.store(finds, Relaxed);
    }
    Ok(IS_AVAILABLE.load(Relaxed))
}

/// None if no socket can have both addresses.
fn request_for(local: SocketAddr, remote: SocketAddr) -> Option<[u8; REQUEST_BYTES]> {
    let (family, source, destination, interface) = match (local, remote) {
        (SocketAddr::V4(local), SocketAddr::V4(remote)) => {
            // An IPv4 address is the first of four words.
            let words = |address: &Ipv4Addr| u128::from(address.to_bits()) << 96;
            (AddressFamily::INET, words(local.ip()), words(remote.ip()), 0)
        }
        (SocketAddr::V6(local), SocketAddr::V6(remote)) => {
            let (source, destination) = (local.ip().to_bits(), remote.ip().to_bits());
            (AddressFamily::INET6, source, destination, local.scope_id())
        }
        _ => return None,
    };
    let fields: [&[u8]; 12] = [
        // `nlmsghdr`, without a sequence number: a connection to the kernel has one request.
        &u32::try_from(REQUEST_BYTES).ok()?.to_ne_bytes(),
        &BY_FAMILY.to_ne_bytes(),
        &REQUEST.to_ne_bytes(),
        &[0; 8],
        // No extensions, all states.
        &[u8::try_from(family.as_raw()).ok()?, TCP, 0, 0],
        &u32::MAX.to_ne_bytes(),
        // `struct inet_diag_sockid`.
        &local.port().to_be_bytes(),
        &remote.port().to_be_bytes(),
        &source.to_be_bytes(),
        &destination.to_be_bytes(),
        &interface.to_ne_bytes(),
        &ANY_COOKIE,
    ];
    fields.concat().try_into().ok()
}

/// An IPv4 address that is mapped to IPv6, as IPv4; any other as it is. The kernel finds sockets
/// with mapped addresses by those of IPv4.
fn unmapped(address: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(six) = address else { return address };
    six.ip().to_ipv4_mapped().map_or(address, |four| (four, six.port()).into())
}

/// Opens a connection to the kernel, for the calling thread's network namespace.
fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = Some(netlink::SOCK_DIAG);
    Ok(socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?)
}

/// Sends a request, and receives its reply, which is there as soon as the request is sent.
fn exchange(kernel: &OwnedFd, request: &[u8]) -> io::Result<TcpSocket> {
    send(kernel, request, SendFlags::empty())?;
    let mut reply = [0; REPLY_BYTES];
    let (length, _) = recv(kernel, reply.as_mut_slice(), RecvFlags::empty())?;
    let reply = reply.get(..length).and_then(parse);
    reply.unwrap_or_else(|| Err(ErrorKind::InvalidData.into()))
}

/// The socket, or the error. None if the reply is neither.
fn parse(reply: &[u8]) -> Option<io::Result<TcpSocket>> {
    let word = |at: usize| -> Option<[u8; 4]> { reply.get(at..at + 4)?.try_into().ok() };
    let [low, high, ..] = word(TYPE_AT)?;
    match u16::from_ne_bytes([low, high]) {
        BY_FAMILY => Some(Ok(TcpSocket {
            state: *reply.get(STATE_AT)?,
            uid: u32::from_ne_bytes(word(UID_AT)?),
            inode: u32::from_ne_bytes(word(INODE_AT)?),
        })),
        ERROR => {
            let errno = i32::from_ne_bytes(word(ERRNO_AT)?).checked_neg()?;
            Some(Err(Errno::from_raw_os_error(errno).into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    /// Among many sockets too, there is one reply, and nothing more is received.
    #[test]
    fn a_request_has_one_reply() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let many: Vec<_> = (0..100)
            .map(|_| (TcpStream::connect(at).unwrap(), listener.accept().unwrap().0))
            .collect();
        let (near, _) = &many[50];
        let request = request_for(near.local_addr().unwrap(), at).unwrap();
        let kernel = open().unwrap();
        assert_ne!(exchange(&kernel, &request).unwrap().inode, 0);
        let mut more = [0; 1];
        let nothing = recv(&kernel, more.as_mut_slice(), RecvFlags::empty()).unwrap_err();
        assert_eq!(nothing, Errno::AGAIN);
        let port_9 = request_for("127.0.0.1:9".parse().unwrap(), at).unwrap();
        let error = exchange(&kernel, &port_9).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(is_available().unwrap());
    }

    #[test]
    fn no_socket_has_addresses_of_both_families() {
        let (four, six) = ("127.0.0.1:9".parse().unwrap(), "[::1]:9".parse().unwrap());
        assert_eq!(request_for(four, six), None);
        assert_eq!(find(four, six).unwrap(), None);
    }

    #[test]
    fn replies_are_checked() {
        let mut reply = vec![0; REPLY_BYTES];
        reply[TYPE_AT] = 20;
        reply[STATE_AT] = 10;
        reply[UID_AT..INODE_AT].copy_from_slice(&64_055u32.to_ne_bytes());
        reply[INODE_AT..].copy_from_slice(&123_456u32.to_ne_bytes());
        let expected = TcpSocket { state: 10, uid: 64_055, inode: 123_456 };
        assert_eq!(parse(&reply).unwrap().unwrap(), expected);
        for length in 0..REPLY_BYTES {
            assert!(parse(&reply[..length]).is_none(), "{length}");
        }
        reply[TYPE_AT] = 2;
        reply[ERRNO_AT..ERRNO_AT + 4].copy_from_slice(&(-2i32).to_ne_bytes());
        let error = parse(&reply).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        reply[ERRNO_AT..ERRNO_AT + 4].copy_from_slice(&i32::MIN.to_ne_bytes());
        assert!(parse(&reply).is_none());
        reply[TYPE_AT] = 3;
        assert!(parse(&reply).is_none());
    }
}
