//! A connection between two agents, plain or secured, for blocking threads: one
//! reads, one writes, and any can end it.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::AlertDescription;

use crate::inbox::Inbox;
use crate::keys::Keys;
use crate::outbox::Outbox;
use crate::reader::Reader;
use crate::record::TrafficKey;
use crate::socket::{Closer, Socket};
use crate::writer::Writer;

/// A whole connection. [`Connection::halves`] and [`Connection::into_halves`]
/// let two threads use it at the same time.
#[derive(Debug)]
pub struct Connection {
    reader: Reader,
    writer: Writer,
    peer: Option<String>,
    is_resumed: bool,
}

impl Connection {
    /// A connection without protection, whose peer is not authenticated.
    #[must_use]
    pub fn plain(stream: TcpStream) -> Self {
        let socket = Socket::shared(stream);
        Self {
            reader: Reader::plain(Arc::clone(&socket)),
            writer: Writer::plain(socket),
            peer: None,
            is_resumed: false,
        }
    }

    /// A connection after its handshake: from here on records are sealed and
    /// opened by this crate. (For kTLS, the kernel would be given the two keys here,
    /// and the reader `came`, opened.)
    pub(crate) fn secured(
        stream: TcpStream,
        [to_open, to_seal]: [TrafficKey; 2],
        keys: Keys,
        came: &[u8],
        peer: String,
        is_resumed: bool,
    ) -> Self {
        let (socket, keys) = (Socket::shared(stream), Arc::new(keys));
        let inbox = Inbox::new(to_open, came);
        let outbox = Outbox::new(to_seal, Arc::clone(&keys));
        Self {
            reader: Reader::secured(Arc::clone(&socket), inbox, keys),
            writer: Writer::secured(socket, outbox),
            peer: Some(peer),
            is_resumed,
        }
    }

    /// The host at the other end, as its certificate names it; `None` for a plain
    /// connection.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.peer.as_deref()
    }

    /// Whether it was resumed with a ticket of an earlier connection.
    #[must_use]
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Both halves, for two threads of a scope.
    pub fn halves(&mut self) -> (&mut Reader, &mut Writer) {
        (&mut self.reader, &mut self.writer)
    }

    /// Both halves, for two threads. The connection ends when both are dropped.
    #[must_use]
    pub fn into_halves(self) -> (Reader, Writer) {
        (self.reader, self.writer)
    }

    /// A handle that ends the connection from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        self.reader.closer()
    }

    /// Ends the connection in order: the peer learns that nothing was cut off.
    pub fn close(&mut self) {
        self.writer.close();
    }

    /// Ends the connection with an alert that says why the peer is refused.
    pub(crate) fn refuse(&mut self, why: AlertDescription) -> &TcpStream {
        self.writer.end(why);
        &self.reader.socket().stream
    }

    /// Sets how long a read waits for bytes; `None` is for ever.
    pub fn set_read_timeout(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.reader.set_timeout(limit)
    }

    /// As [`Reader::set_deadline`].
    pub fn set_read_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.reader.set_deadline(deadline)
    }

    /// Sets how long a write waits for room; `None` is for ever. A secured connection
    /// can't be used after a write that timed out.
    pub fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        self.reader.socket().stream.set_write_timeout(limit)
    }

    /// The address of the other end.
    ///
    /// # Errors
    /// If the socket is no longer connected.
    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.reader.socket().stream.peer_addr()
    }

    /// The address of this end.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.reader.socket().stream.local_addr()
    }

    /// As [`Reader::read_ready`].
    pub fn read_ready(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        self.reader.read_ready(into)
    }
}

#[cfg(test)]
impl Connection {
    pub(crate) fn change_key_after(&mut self, records: u64) {
        self.writer.change_key_after(records);
    }

    /// Asks the peer for a new key.
    pub(crate) fn ask_new_key(&mut self) {
        self.writer.ask_new_key();
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reader.read(into)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.writer.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
