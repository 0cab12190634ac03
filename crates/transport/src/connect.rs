//! Makes connections: bound to a NIC, tuned, secured, and introduced.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use identity::{Connection, HandshakeError, RecordError, Security, is_tls_alert};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use wire::{Kind, Preamble, Reply, Versions, WireError};

use crate::error::LaneError;

/// A host in the same network answers in milliseconds; one across the world in half a
/// second, or three times that with a lost SYN.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Unacknowledged data this old means that the path is dead. Long enough for a switch to
/// fail over, short enough to move on to the other lanes.
pub const DEAD_AFTER: Duration = Duration::from_secs(8);
/// Unsent data that the kernel accepts per lane. The rest waits in the agent's queue,
/// where any lane with room can take it.
const NOT_SENT_BYTES: u32 = 256 << 10;

/// The two ends of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The local NIC's address to connect from.
    pub local: Option<IpAddr>,
    /// The agent's address to connect to.
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

/// Connects to the agent of the host `peer`, for a control connection or another `kind`;
/// with certificates, only if the agent proves to be that host's.
///
/// # Errors
/// If the agent doesn't run, isn't that host's, speaks no common version of the
/// protocol, or refuses the connection.
pub fn connect(
    endpoint: Endpoint,
    peer: &str,
    security: &Security,
    kind: Kind,
) -> Result<Connection, LaneError> {
    connect_speaking(Versions::SPOKEN, endpoint, peer, security, kind)
}

/// As [`connect`], from an agent that speaks these versions.
fn connect_speaking(
    versions: Versions,
    endpoint: Endpoint,
    peer: &str,
    security: &Security,
    kind: Kind,
) -> Result<Connection, LaneError> {
    let remote = endpoint.remote;
    let mut offered = versions;
    loop {
        let connection = security
            .connect(open(endpoint, security)?, peer)
            .map_err(|source| LaneError::Handshake { remote, source })?;
        let preamble = Preamble { kind, versions: offered };
        match introduce(connection, remote, security, preamble)? {
            Introduced::Welcome(connection) => return Ok(connection),
            // The peer can't choose from the offer: release 0.1.0 examines only the
            // newest version. Offered its own version alone, it has to accept.
            Introduced::Speaks(theirs) => match versions.common(theirs) {
                Some(common) if offered != Versions::only(common) => {
                    offered = Versions::only(common);
                }
                _ => return Err(WireError::Version { theirs, ours: versions }.into()),
            },
        }
    }
}

/// The peer's reaction to a preamble.
enum Introduced {
    Welcome(Connection),
    /// The peer speaks other versions than were offered.
    Speaks(Versions),
}

fn open(endpoint: Endpoint, security: &Security) -> Result<TcpStream, LaneError> {
    let Endpoint { local, remote } = endpoint;
    let failed = |source| LaneError::Connect { remote, source };
    if let Security::Within(process) = security {
        return process.connect().map_err(failed);
    }
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

/// Sets the options of every connection between agents: no delay for small writes,
/// detection of a dead path, a short queue in the kernel.
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
    security: &Security,
    preamble: Preamble,
) -> Result<Introduced, LaneError> {
    let broken = |source| LaneError::Broken { remote, source };
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    connection.set_read_deadline(Some(deadline)).map_err(broken)?;
    let said = connection.write_all(&preamble.to_bytes());
    let mut reply = [0; Reply::BYTES];
    // A peer that refuses has sent its reason before the connection broke, so read that
    // first.
    let received = connection.read_exact(&mut reply);
    received.map_err(|source| turned_away(remote, security, source))?;
    said.map_err(broken)?;
    connection.set_read_deadline(None).map_err(broken)?;
    if is_tls_alert(&reply) && connection.peer().is_none() {
        return Err(LaneError::Handshake { remote, source: HandshakeError::PeerIsSecure });
    }
    match Reply::parse(&reply, preamble.versions)?.0 {
        Reply::Welcome => Ok(Introduced::Welcome(connection)),
        Reply::OtherVersion(theirs) => Ok(Introduced::Speaks(theirs)),
        reply => Err(LaneError::Turned { remote, reply }),
    }
}

/// In TLS 1.3 the client is ready before the server has verified it, so a refusal
/// arrives with the first read.
fn turned_away(remote: SocketAddr, security: &Security, source: std::io::Error) -> LaneError {
    let refusal = source.get_ref().and_then(|inner| match inner.downcast_ref() {
        Some(RecordError::Refused(refusal)) => Some(*refusal),
        _ => None,
    });
    match refusal {
        Some(refusal) => LaneError::Handshake { remote, source: security.refused(refusal) },
        None => LaneError::Broken { remote, source },
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use identity::WithinProcess;

    use super::*;

    const BOTH: Versions = Versions { oldest: 4, newest: 5 };

    /// No address is connected to, and the other end is no TCP socket.
    #[test]
    fn a_connection_within_the_process_is_introduced_like_any_other() {
        let (tell, ends) = std::sync::mpsc::channel();
        let process = WithinProcess::new(move || {
            let (ours, theirs) = UnixStream::pair()?;
            let mut theirs = TcpStream::from(OwnedFd::from(theirs));
            let tell = tell.clone();
            thread::spawn(move || {
                let mut preamble = [0; Preamble::BYTES];
                theirs.read_exact(&mut preamble).unwrap();
                theirs.write_all(&this_release(&preamble)).unwrap();
                theirs.read_exact(&mut preamble[..1]).unwrap();
                tell.send(preamble[0]).unwrap();
            });
            Ok(TcpStream::from(OwnedFd::from(ours)))
        });
        let endpoint = Endpoint { local: None, remote: ([127, 0, 0, 1], 1).into() };
        let security = Security::Within(process);
        let mut connection = connect(endpoint, "here", &security, Kind::Control).unwrap();
        connection.write_all(&[7]).unwrap();
        assert_eq!(ends.recv(), Ok(7));
        assert_eq!(connection.peer(), None);
    }

    /// An agent's answer to a preamble.
    type Answers = fn(&[u8; Preamble::BYTES]) -> [u8; Reply::BYTES];

    /// Release 0.1.0 compares one number, and accepts only its own.
    fn release_before(preamble: &[u8; Preamble::BYTES]) -> [u8; Reply::BYTES] {
        let status = if preamble[8..10] == [4, 0] { 0 } else { 3 };
        let mut reply = *b"DROVEWAY\x04\0\0\0\0\0\0\0";
        reply[10] = status;
        reply
    }

    fn this_release(preamble: &[u8; Preamble::BYTES]) -> [u8; Reply::BYTES] {
        match Preamble::parse(preamble, BOTH) {
            Ok((_, version)) => Reply::Welcome.to_bytes(version),
            Err(_) => Reply::OtherVersion(BOTH).to_bytes(0),
        }
    }

    fn undecided(_: &[u8; Preamble::BYTES]) -> [u8; Reply::BYTES] {
        Reply::OtherVersion(Versions::only(4)).to_bytes(0)
    }

    /// The newest version of each preamble that an agent receives, and the outcome.
    fn offers(ours: Versions, answers: Answers) -> (Vec<u8>, Result<(), String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let remote = listener.local_addr().unwrap();
        let caller = thread::spawn(move || {
            let endpoint = Endpoint { local: None, remote };
            connect_speaking(ours, endpoint, "host-b", &Security::Plaintext, Kind::Control)
                .map(|_| ())
                .map_err(|error| error.to_string())
        });
        let mut received = Vec::new();
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            let mut preamble = [0; Preamble::BYTES];
            stream.read_exact(&mut preamble).unwrap();
            received.push(preamble[8]);
            let reply = answers(&preamble);
            stream.write_all(&reply).unwrap();
            open.push(stream);
            let asks_again = reply[10] == 3
                && received.len() < 2
                && ours.contains(4)
                && ours != Versions::only(4);
            if !asks_again {
                return (received, caller.join().unwrap());
            }
        }
    }

    #[test]
    fn an_agent_of_the_previous_release_is_offered_its_own_version() {
        assert_eq!(offers(BOTH, release_before), (vec![5, 4], Ok(())));
        assert_eq!(offers(Versions::only(4), release_before), (vec![4], Ok(())));
    }

    #[test]
    fn an_agent_that_can_choose_is_asked_once() {
        assert_eq!(offers(BOTH, this_release), (vec![5], Ok(())));
        assert_eq!(offers(Versions::only(4), this_release), (vec![4], Ok(())));
    }

    #[test]
    fn without_a_common_version_both_are_named() {
        let (received, ended) = offers(Versions::only(5), release_before);
        assert_eq!(received, [5]);
        let said = ended.unwrap_err();
        assert!(said.contains("has version 4 of"), "{said}");
        assert!(said.contains("this agent version 5"), "{said}");
        let (received, ended) = offers(BOTH, undecided);
        assert_eq!(received, [5, 4]);
        assert!(ended.is_err(), "it does not go on for ever");
    }
}
