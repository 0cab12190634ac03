//! The first messages of a connection: who the peer is, what it wants, and why it is not served.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use host::nic;
use identity::{Connection, HandshakeError, Security};
use wire::{Kind, Preamble, Reply, Versions, WireError};

/// The time in which a peer that has connected must identify itself.
pub(super) const PREAMBLE_MAX: Duration = Duration::from_secs(5);

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
pub(super) enum TurnedAway {
    /// The peer has no right to connect here, or does not speak TLS as expected.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The peer violates the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer violates the directory's protocol.
    #[error(transparent)]
    Directory(#[from] directory::ServeError),
    /// The peer claims another host's name.
    #[error("it gave the name {claimed}, and its certificate is for {certified}")]
    OtherName {
        /// The name that it claims.
        claimed: String,
        /// The name in its certificate.
        certified: String,
    },
    /// The peer is no host that this one knows.
    #[error("it is {0}, which is not in the peers file of this host")]
    NotListed(String),
    /// A user of this host who may not connect.
    #[error(
        "it comes from this host, and not from root or the agent's own user: without certificates \
         only these may connect (its user id: {})",
        .0.map_or_else(|| "not known".to_owned(), |user| user.to_string())
    )]
    OtherUser(Option<u32>),
    /// The kernel doesn't report whose connection it is.
    #[error(transparent)]
    Owner(#[from] nic::NicError),
}

impl From<io::Error> for TurnedAway {
    fn from(error: io::Error) -> Self {
        Self::Wire(error.into())
    }
}

/// Refuses other users of this host, who can all connect to its loopback: a peer can have programs
/// started. With certificates these say who connects. The address here decides, because the other
/// one may be any address of the host.
pub(super) fn check_user(security: &Security, stream: &TcpStream) -> Result<(), TurnedAway> {
    let here = stream.local_addr()?;
    if security.is_secure() || !here.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let own = rustix::process::geteuid().as_raw();
    match nic::user_of(stream.peer_addr()?, here)? {
        Some(user) if user == 0 || user == own => Ok(()),
        user => Err(TurnedAway::OtherUser(user)),
    }
}

/// Reads a connection's purpose, and the version of the protocol that both speak.
pub(super) fn greet(connection: &mut Connection) -> Result<(Kind, u16), TurnedAway> {
    connection.set_read_deadline(Some(Instant::now() + PREAMBLE_MAX))?;
    let mut bytes = [0; Preamble::BYTES];
    connection.read_exact(&mut bytes)?;
    let greeting = match Preamble::parse(&bytes, Versions::SPOKEN) {
        Ok(greeting) => greeting,
        Err(error @ WireError::Version { theirs, ours }) => {
            turn_away(connection, Reply::OtherVersion(ours), theirs.newest)?;
            return Err(error.into());
        }
        // A peer that is not Droveway gets no answer.
        Err(error) => return Err(error.into()),
    };
    connection.set_read_deadline(None)?;
    Ok(greeting)
}

pub(super) fn turn_away(
    connection: &mut Connection,
    reply: Reply,
    version: u16,
) -> Result<(), TurnedAway> {
    connection.write_all(&reply.to_bytes(version))?;
    connection.close();
    Ok(())
}

/// With certificates, a host can't use another host's name.
pub(super) fn check_name(connection: &Connection, claimed: &str) -> Result<(), TurnedAway> {
    match connection.peer() {
        Some(certified) if certified != claimed => Err(TurnedAway::OtherName {
            claimed: claimed.to_owned(),
            certified: certified.to_owned(),
        }),
        _ => Ok(()),
    }
}
