//! The bytes of a handshake. The peer is not identified yet, so little is buffered,
//! and not for long.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustls::unbuffered::{EncodeError, EncodeTlsData, InsufficientSizeError};

use super::{HANDSHAKE_MAX, HandshakeError};
use crate::record::{HEADER_BYTES, RECORD_BYTES_MAX};
use crate::refusal::PLAINTEXT_ONLY;

/// Most bytes received and not yet used. A certificate with the messages around it
/// has 2 KiB; one record must fit.
const CAME_BYTES_MAX: usize = RECORD_BYTES_MAX + (4 << 10);
/// Most bytes sent at once.
const SAID_BYTES_MAX: usize = 64 << 10;
/// How long a refused peer may continue sending before it reads why.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// How many bytes it may send until then.
const LINGER_BYTES_MAX: usize = 64 << 10;
/// Kinds of records that a handshake may start with.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// One end's view of the handshake's bytes.
pub(crate) struct Talk<'s> {
    came: Vec<u8>,
    /// How much of `came` is received.
    filled: usize,
    /// How much of `came` rustls may see: whole records, and no more of them than it asks
    /// for. So it never sees what follows the handshake.
    offered: usize,
    outgoing: Outgoing<'s>,
    deadline: Instant,
    has_received: bool,
}

/// Bytes to be sent to the peer.
pub(crate) struct Outgoing<'s> {
    stream: &'s TcpStream,
    bytes: Vec<u8>,
}

impl<'s> Talk<'s> {
    pub(crate) fn begin(stream: &'s TcpStream) -> Result<Self, HandshakeError> {
        stream.set_write_timeout(Some(HANDSHAKE_MAX))?;
        Ok(Self {
            came: Vec::new(),
            filled: 0,
            offered: 0,
            outgoing: Outgoing { stream, bytes: Vec::new() },
            deadline: Instant::now() + HANDSHAKE_MAX,
            has_received: false,
        })
    }

    /// The received bytes that rustls may see, and the bytes to be sent.
    pub(crate) fn parts(&mut self) -> (&mut [u8], &mut Outgoing<'s>) {
        (&mut self.came[..self.offered], &mut self.outgoing)
    }

    /// Drops the first received bytes, which rustls has used.
    pub(crate) fn discard(&mut self, bytes: usize) {
        let bytes = bytes.min(self.offered);
        self.came.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
        self.offered -= bytes;
    }

    /// Offers one more record to rustls, reading until it is complete.
    pub(crate) fn read_record(&mut self) -> Result<(), HandshakeError> {
        loop {
            let next = &self.came[self.offered..self.filled];
            if let Some((first, _)) = next.split_first() {
                let is_first = !std::mem::replace(&mut self.has_received, true);
                if is_first && ![ALERT, HANDSHAKE].contains(first) {
                    return Err(HandshakeError::PeerIsPlain);
                }
            }
            if let Some([.., high, low]) = next.first_chunk::<HEADER_BYTES>() {
                let bytes = HEADER_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
                if bytes > RECORD_BYTES_MAX {
                    return Err(HandshakeError::Protocol("a record is too long".to_owned()));
                }
                if next.len() >= bytes {
                    self.offered += bytes;
                    return Ok(());
                }
            }
            self.read()?;
        }
    }

    fn read(&mut self) -> Result<(), HandshakeError> {
        if self.filled == CAME_BYTES_MAX {
            return Err(HandshakeError::Protocol("its first message does not end".to_owned()));
        }
        self.came.resize(CAME_BYTES_MAX, 0);
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandshakeError::TooSlow);
        }
        let mut stream = self.outgoing.stream;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut self.came[self.filled..]) {
            Ok(0) if !self.has_received => Err(HandshakeError::Unanswered),
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(bytes) => {
                self.filled += bytes;
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(HandshakeError::TooSlow),
                io::ErrorKind::ConnectionReset if !self.has_received => {
                    Err(HandshakeError::Unanswered)
                }
                _ => Err(error.into()),
            },
        }
    }

    /// Removes the socket's timeouts. Returns the bytes received after the
    /// handshake.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, HandshakeError> {
        self.outgoing.stream.set_read_timeout(None)?;
        self.outgoing.stream.set_write_timeout(None)?;
        self.came.truncate(self.filled);
        self.came.drain(..self.offered);
        Ok(self.came)
    }

    /// Tells a plaintext agent that this end speaks TLS. The alert is repeated until it is
    /// as long as the answer that the agent waits for.
    pub(crate) fn answer_plain(&mut self) {
        self.outgoing.bytes = plain_alert().repeat(3);
        // The peer may have disconnected.
        let _ = self.outgoing.send();
    }

    /// To be called before the connection is dropped: see [`linger`].
    pub(crate) fn linger(&self) {
        linger(self.outgoing.stream);
    }
}

impl Outgoing<'_> {
    /// Adds a message from rustls.
    pub(crate) fn encode<D>(
        &mut self,
        data: &mut EncodeTlsData<'_, D>,
    ) -> Result<(), HandshakeError> {
        let filled = self.bytes.len();
        loop {
            match data.encode(&mut self.bytes[filled..]) {
                Ok(bytes) => {
                    self.bytes.truncate(filled + bytes);
                    return Ok(());
                }
                Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size }))
                    if filled + required_size <= SAID_BYTES_MAX =>
                {
                    self.bytes.resize(filled + required_size, 0);
                }
                Err(error) => return Err(HandshakeError::Protocol(error.to_string())),
            }
        }
    }

    /// Sends all added messages.
    pub(crate) fn send(&mut self) -> Result<(), HandshakeError> {
        let mut stream = self.stream;
        let sent = stream.write_all(&self.bytes);
        self.bytes.clear();
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => HandshakeError::TooSlow,
            _ => error.into(),
        })
    }
}

/// An alert that needs no key: the peer speaks TLS and this end doesn't, or the reverse.
fn plain_alert() -> [u8; 7] {
    [ALERT, 3, 3, 0, 2, 2, u8::from(PLAINTEXT_ONLY)]
}

/// Refuses a peer that speaks TLS to a plaintext agent. Returns whether it does, by its
/// first bytes.
pub(crate) fn turn_away(first: &[u8], mut stream: &TcpStream) -> bool {
    let is_tls = first.first() == Some(&HANDSHAKE);
    // The peer may have disconnected.
    if is_tls && stream.write_all(&plain_alert()).is_ok() {
        linger(stream);
    }
    is_tls
}

/// Lets the peer read what was sent last: closing a socket with unread bytes resets the
/// connection, and the peer loses what it hasn't read yet.
pub(crate) fn linger(mut stream: &TcpStream) {
    let deadline = Instant::now() + LINGER_MAX;
    let mut unwanted = [0; 4 << 10];
    let mut left = LINGER_BYTES_MAX;
    if stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    while left > 0 {
        let wait = deadline.saturating_duration_since(Instant::now());
        if wait.is_zero() || stream.set_read_timeout(Some(wait)).is_err() {
            return;
        }
        match stream.read(&mut unwanted) {
            Ok(0) | Err(_) => return,
            Ok(bytes) => left = left.saturating_sub(bytes),
        }
    }
}
