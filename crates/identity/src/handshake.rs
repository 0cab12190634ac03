//! The TLS handshake: rustls makes and reads the messages, and this module sends and
//! receives them, within limits of time and of bytes.

mod error;
mod talk;

use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::ServerName;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{AlertDescription, CommonState, Error, ExtractedSecrets, HandshakeKind};

pub use error::{HANDSHAKE_MAX, HandshakeError, is_tls_alert};

use crate::connection::Connection;
use crate::identity::{Identity, PROTOCOL};
use crate::keys::{Keys, Schedule};
use crate::record::TrafficKey;
use crate::verify::{Again, Called};
use talk::Talk;
pub(crate) use talk::turn_away;

impl Identity {
    /// Secures a connection to the host `peer`. The socket has no timeouts
    /// afterwards.
    ///
    /// If the peer refuses this host, the first read returns that: in TLS 1.3 the client
    /// finishes before the server has verified it. That read also processes the tickets
    /// that make the next connection cheaper. The socket needs `TCP_NODELAY`, or the
    /// handshake waits for acknowledgements.
    ///
    /// # Errors
    /// If the other end is not that host, or doesn't answer in time.
    pub fn connect(&self, stream: TcpStream, peer: &str) -> Result<Connection, HandshakeError> {
        let shown = self.shown();
        let config = shown.client(peer).map_err(HandshakeError::of)?;
        let nowhere = ServerName::IpAddress(Ipv4Addr::LOCALHOST.into());
        let end = UnbufferedClientConnection::new(config, nowhere).map_err(HandshakeError::of)?;
        let called = Called { trust: Arc::clone(&shown.trust), name: peer.to_owned() };
        secure(end, stream, &called).map_err(|error| self.explained(error))
    }

    /// Secures an accepted connection. The caller's name is
    /// [`Connection::peer`]. The socket has no timeouts afterwards.
    ///
    /// # Errors
    /// If the other end is not a host with a certificate of a trusted CA, which an alert
    /// has told it, or doesn't answer in time.
    pub fn accept(&self, stream: TcpStream) -> Result<Connection, HandshakeError> {
        let shown = self.shown();
        let end = UnbufferedServerConnection::new(shown.server()).map_err(HandshakeError::of)?;
        secure(end, stream, &*shown.calling).map_err(|error| match error {
            // Nothing had been sent yet that the peer could refuse.
            HandshakeError::Unanswered => HandshakeError::Silent,
            error => self.explained(error),
        })
    }

    fn explained(&self, error: HandshakeError) -> HandshakeError {
        match error {
            HandshakeError::Refused(refusal) => self.refused(refusal),
            error => error,
        }
    }
}

/// What rustls's client and server connections have in common.
trait End: std::ops::Deref<Target: std::ops::Deref<Target = CommonState>> + Sized {
    type Data;
    fn process<'c, 'i>(&'c mut self, came: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
    fn into_keys(self) -> Result<(ExtractedSecrets, KernelConnection<Self::Data>), Error>;
}

impl End for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, came: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(came)
    }

    fn into_keys(self) -> Result<(ExtractedSecrets, KernelConnection<Self::Data>), Error> {
        self.dangerous_into_kernel_connection()
    }
}

impl End for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, came: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(came)
    }

    fn into_keys(self) -> Result<(ExtractedSecrets, KernelConnection<Self::Data>), Error> {
        self.dangerous_into_kernel_connection()
    }
}

fn secure<E: End>(
    mut end: E,
    stream: TcpStream,
    again: &impl Again,
) -> Result<Connection, HandshakeError>
where
    KernelConnection<E::Data>: Schedule + 'static,
{
    let mut talk = Talk::begin(&stream)?;
    if let Err(error) = shake(&mut end, &mut talk) {
        if let HandshakeError::PeerIsPlain = error {
            talk.answer_plain();
        } else {
            say_why(&mut end, &mut talk);
        }
        talk.linger();
        return Err(error);
    }
    let is_resumed = end.handshake_kind() == Some(HandshakeKind::Resumed);
    let is_agent = end.alpn_protocol() == Some(PROTOCOL);
    let peer = again.verify_again(end.peer_certificates().unwrap_or_default());
    let (secrets, schedule) = end.into_keys().map_err(HandshakeError::of)?;
    let keys = Keys::new(Box::new(schedule));
    let (to_open, to_seal) = (TrafficKey::new(secrets.rx)?, TrafficKey::new(secrets.tx)?);
    let came = talk.finish()?;

    let (name, problem) = match peer {
        Ok(name) if is_agent => (name, None),
        Ok(name) => (name, Some(HandshakeError::NotAnAgent)),
        Err(error) => (String::new(), Some(HandshakeError::of(error))),
    };
    let mut connection =
        Connection::secured(stream, [to_open, to_seal], keys, &came, name, is_resumed);
    let Some(problem) = problem else { return Ok(connection) };
    let why = match &problem {
        HandshakeError::Certificate(problem) => problem.alert(),
        _ => AlertDescription::NoApplicationProtocol,
    };
    talk::linger(connection.refuse(why));
    Err(problem)
}

/// What to do next.
enum Next {
    Again,
    Read,
    Done,
}

/// Runs the handshake until both ends have the same keys.
fn shake<E: End>(end: &mut E, talk: &mut Talk<'_>) -> Result<(), HandshakeError> {
    loop {
        let (came, outgoing) = talk.parts();
        let UnbufferedStatus { discard, state, .. } = end.process(came);
        let next = match state.map_err(HandshakeError::of)? {
            ConnectionState::EncodeTlsData(mut data) => {
                outgoing.encode(&mut data)?;
                Next::Again
            }
            ConnectionState::TransmitTlsData(data) => {
                outgoing.send()?;
                data.done();
                Next::Again
            }
            ConnectionState::BlockedHandshake => Next::Read,
            ConnectionState::WriteTraffic(_) => Next::Done,
            // Only an end: rustls is offered no records beyond the handshake.
            _ => return Err(HandshakeError::Protocol("the peer ended it".to_owned())),
        };
        talk.discard(discard);
        match next {
            Next::Again => {}
            Next::Read => talk.read_record()?,
            Next::Done => return Ok(()),
        }
    }
}

/// Sends the alert that rustls has ready after an error, if it has one. As long
/// as it has, it doesn't process input.
fn say_why<E: End>(end: &mut E, talk: &mut Talk<'_>) {
    let (_, outgoing) = talk.parts();
    while end.wants_write() {
        let Ok(ConnectionState::EncodeTlsData(mut data)) = end.process(&mut []).state else {
            return;
        };
        if outgoing.encode(&mut data).is_err() {
            return;
        }
    }
    // The peer may have disconnected; the caller returns the error anyway.
    let _ = outgoing.send();
}
