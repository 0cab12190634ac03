//! How agents communicate: with certificates, or in plaintext if the operator has
//! configured that; and how one communicates with itself.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use rustix::net::{RecvFlags, recv};

use crate::connection::Connection;
use crate::handshake::{HANDSHAKE_MAX, HandshakeError, turn_away};
use crate::identity::Identity;
use crate::refusal::Refusal;

/// The security of all connections between an agent and others.
#[derive(Clone, Debug)]
pub enum Security {
    /// Nothing is encrypted, and anybody may connect.
    Plaintext,
    /// Mutual TLS.
    Tls(Arc<Identity>),
    /// Nothing is encrypted, and the other end is in this process.
    Within(WithinProcess),
}

/// Makes connections to another part of this process.
#[derive(Clone)]
pub struct WithinProcess(Arc<Connect>);

type Connect = dyn Fn() -> io::Result<TcpStream> + Send + Sync;

impl WithinProcess {
    /// Each call of `connect` returns one end of a new pair of sockets, whose other end is served
    /// already. A pair of unix sockets does: nothing but the address of an end differs.
    #[must_use]
    pub fn new(connect: impl Fn() -> io::Result<TcpStream> + Send + Sync + 'static) -> Self {
        Self(Arc::new(connect))
    }

    /// Makes a connection.
    ///
    /// # Errors
    /// If the system has no sockets or threads left.
    pub fn connect(&self) -> io::Result<TcpStream> {
        (self.0)()
    }
}

impl fmt::Debug for WithinProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithinProcess").finish_non_exhaustive()
    }
}

impl Security {
    /// Secures a new connection to the host `peer`, if TLS is used.
    ///
    /// # Errors
    /// As [`Identity::connect`]; plaintext always works.
    pub fn connect(&self, stream: TcpStream, peer: &str) -> Result<Connection, HandshakeError> {
        match self {
            Self::Plaintext | Self::Within(_) => Ok(Connection::plain(stream)),
            Self::Tls(identity) => identity.connect(stream, peer),
        }
    }

    /// Secures an accepted connection, if TLS is used. The socket has no
    /// timeouts afterwards.
    ///
    /// # Errors
    /// As [`Identity::accept`]; in plaintext if the peer speaks TLS or sends
    /// nothing.
    pub fn accept(&self, stream: TcpStream) -> Result<Connection, HandshakeError> {
        match self {
            Self::Plaintext => {
                refuse_tls(&stream)?;
                Ok(Connection::plain(stream))
            }
            Self::Tls(identity) => identity.accept(stream),
            Self::Within(_) => Ok(Connection::plain(stream)),
        }
    }

    /// Why the peer refuses this host, with what this host knows of the reason. In TLS 1.3 the
    /// refusal is an error of the first read.
    #[must_use]
    pub fn refused(&self, refusal: Refusal) -> HandshakeError {
        match self {
            Self::Plaintext | Self::Within(_) => refusal.into(),
            Self::Tls(identity) => identity.refused(refusal),
        }
    }

    /// Whether peers are authenticated and connections encrypted, or never leave this process.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        matches!(self, Self::Tls(_) | Self::Within(_))
    }

    /// Whether the other end is in this process.
    #[must_use]
    pub fn is_within_process(&self) -> bool {
        matches!(self, Self::Within(_))
    }
}

/// Refuses a peer that speaks TLS, with an alert that says so.
fn refuse_tls(stream: &TcpStream) -> Result<(), HandshakeError> {
    stream.set_read_timeout(Some(HANDSHAKE_MAX))?;
    let mut first = [0];
    let peeked = rustix::io::retry_on_intr(|| recv(stream, first.as_mut_slice(), RecvFlags::PEEK));
    match peeked {
        Ok(_) => {}
        Err(rustix::io::Errno::AGAIN) => return Err(HandshakeError::TooSlow),
        Err(error) => return Err(HandshakeError::Io(error.into())),
    }
    if turn_away(&first, stream) {
        return Err(HandshakeError::PeerIsSecure);
    }
    Ok(stream.set_read_timeout(None)?)
}

#[cfg(test)]
mod tests {
    use rustls::AlertDescription;

    use super::*;
    use crate::{Authority, CertificateRequest, Subject};

    #[test]
    fn a_refusal_of_the_certificates_time_says_what_this_hosts_clock_says() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), 100).unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let subject = Subject::host("a").unwrap();
        let out = authority.place_for(&subject);
        let request = CertificateRequest { subject, days: 10, out, replace: false };
        let files = authority.issue(&request).unwrap().files;
        let security = Security::Tls(Arc::new(Identity::load("a", &files).unwrap()));
        let refused = |alert: AlertDescription| security.refused(Refusal(alert.into())).to_string();
        let said = refused(AlertDescription::CertificateExpired);
        assert!(said.starts_with("the peer reports that this host's certificate has"), "{said}");
        assert!(said.contains("one of the two clocks is wrong"), "{said}");
        assert!(!refused(AlertDescription::UnknownCA).contains("clock"));
    }
}
