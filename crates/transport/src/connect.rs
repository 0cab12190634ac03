//! Making connections: bound to a NIC, tuned, secured, and introduced.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use identity::{Connection, HandshakeError, RecordError, Security, is_tls_alert};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use wire::{Kind, Preamble, Reply};

use crate::error::LaneError;

/// A host in the same network answers in milliseconds; one across the world in
/// half a second, thrice with a lost SYN.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Unacknowledged data this old means that the path is gone. Long enough for a
/// switch to fail over, short enough to move on to the other lanes.
const DEAD_AFTER: Duration = Duration::from_secs(8);
/// How much unsent data the kernel takes per lane. The rest waits in our queue,
/// where any lane that has room can take it.
const NOT_SENT_BYTES: u32 = 256 << 10;

/// The two ends of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The NIC's address to leave by.
    pub local: Option<IpAddr>,
    /// The agent's address to reach.
    pub remote: SocketAddr,
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.local {
            Some(local) => write!(f, "{local} -> {}", self.remote),
            None => write!(f, "{}", self.remote),
        }
    }
}

/// Connects to the agent of the host `peer`, for control or whatever else; with
/// certificates, only if it is that host's.
///
/// # Errors
/// If the agent isn't there, isn't that host's, or doesn't take it.
pub fn connect(
    endpoint: Endpoint,
    peer: &str,
    security: &Security,
    kind: Kind,
) -> Result<Connection, LaneError> {
    let remote = endpoint.remote;
    let connection = security
        .connect(open(endpoint)?, peer)
        .map_err(|source| LaneError::Handshake { remote, source })?;
    introduce(connection, remote, kind)
}

fn open(endpoint: Endpoint) -> Result<TcpStream, LaneError> {
    let Endpoint { local, remote } = endpoint;
    let failed = |source| LaneError::Connect { remote, source };
    let socket = Socket::new(Domain::for_address(remote), Type::STREAM, Some(Protocol::TCP))
        .map_err(failed)?;
    if let Some(local) = local {
        socket
            .bind(&SockAddr::from(SocketAddr::new(local, 0)))
            .map_err(|source| LaneError::Bind { local, source })?;
    }
    socket.connect_timeout(&SockAddr::from(remote), CONNECT_TIMEOUT).map_err(failed)?;
    let stream = TcpStream::from(socket);
    tune(&stream).map_err(failed)?;
    Ok(stream)
}

/// Sets what every connection between agents has: no delay for small writes,
/// a dead path noticed, a short queue in the kernel.
///
/// # Errors
/// If the kernel refuses.
pub fn tune(stream: &TcpStream) -> std::io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(4))
            .with_interval(Duration::from_secs(2))
            .with_retries(2),
    )?;
    socket.set_tcp_user_timeout(Some(DEAD_AFTER))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_BYTES)
}

fn introduce(
    mut connection: Connection,
    remote: SocketAddr,
    kind: Kind,
) -> Result<Connection, LaneError> {
    let broken = |source| LaneError::Broken { remote, source };
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    connection.set_read_deadline(Some(deadline)).map_err(broken)?;
    let said = connection.write_all(&Preamble { kind }.to_bytes());
    let mut reply = [0; Reply::BYTES];
    // Whoever doesn't want us has said why before the connection broke.
    let heard = connection.read_exact(&mut reply);
    heard.map_err(|source| turned_away(remote, source))?;
    said.map_err(broken)?;
    connection.set_read_deadline(None).map_err(broken)?;
    if is_tls_alert(&reply) && connection.peer().is_none() {
        return Err(LaneError::Handshake { remote, source: HandshakeError::PeerIsSecure });
    }
    match Reply::parse(&reply)? {
        Reply::Welcome => Ok(connection),
        reply => Err(LaneError::Turned { remote, reply }),
    }
}

/// In TLS 1.3 whoever calls is ready before he is verified: that he is not taken
/// comes with the first read.
fn turned_away(remote: SocketAddr, source: std::io::Error) -> LaneError {
    let refusal = source.get_ref().and_then(|inner| match inner.downcast_ref() {
        Some(RecordError::Refused(refusal)) => Some(*refusal),
        _ => None,
    });
    match refusal {
        Some(refusal) => LaneError::Handshake { remote, source: refusal.into() },
        None => LaneError::Broken { remote, source },
    }
}
