//! The writing half of a connection.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{SendFlags, send};
use rustls::AlertDescription;

use crate::outbox::Outbox;
use crate::socket::{Closer, Socket, as_io};

/// The half that one thread writes to.
pub struct Writer {
    socket: Arc<Socket>,
    tls: Option<Box<Tls>>,
}

struct Tls {
    outbox: Outbox,
    /// No more can be written: the last record was sent, or a write failed, perhaps
    /// within a record.
    is_broken: bool,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("stream", &self.socket.stream)
            .field("is_secured", &self.tls.is_some())
            .finish()
    }
}

impl Writer {
    pub(crate) fn plain(socket: Arc<Socket>) -> Self {
        Self { socket, tls: None }
    }

    pub(crate) fn secured(socket: Arc<Socket>, outbox: Outbox) -> Self {
        Self { socket, tls: Some(Box::new(Tls { outbox, is_broken: false })) }
    }

    /// Ends the connection in order, both ways: the peer learns that nothing was
    /// cut off. It doesn't wait, so a peer that has stopped reading may not learn it.
    pub fn close(&mut self) {
        self.end(AlertDescription::CloseNotify);
        self.socket.close();
    }

    /// Tells the peer why the connection ends.
    pub(crate) fn end(&mut self, why: AlertDescription) {
        if let Some(tls) = &mut self.tls
            && !tls.is_broken
            && !self.socket.is_closed()
            && let Ok(end) = tls.outbox.seal_end(why)
        {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // Whether it is sent or not, this was the last record.
            let _ = send(&self.socket.stream, end, flags);
            tls.is_broken = true;
        }
    }

    /// Its socket, for queries and options; not to be written to.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.stream.as_fd()
    }

    /// A handle that ends the connection from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        Closer { socket: Arc::clone(&self.socket) }
    }
}

#[cfg(test)]
impl Writer {
    pub(crate) fn change_key_after(&mut self, records: u64) {
        self.tls.as_mut().unwrap().outbox.change_key_after(records);
    }

    pub(crate) fn ask_new_key(&mut self) {
        let record = self.tls.as_mut().unwrap().outbox.seal_key_update_asking();
        (&self.socket.stream).write_all(&record).unwrap();
    }
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket.stream).write(bytes),
            Some(tls) => tls.write(&self.socket, &[IoSlice::new(bytes)]),
        }
    }

    /// Returns when the kernel has all bytes that count as written.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket.stream).write_vectored(slices),
            Some(tls) => tls.write(&self.socket, slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tls {
    fn write(&mut self, socket: &Socket, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let outcome = self.outbox.seal(slices).map_err(as_io).and_then(|(taken, records)| {
            (&socket.stream).write_all(records)?;
            Ok(taken)
        });
        self.is_broken = outcome.is_err();
        outcome
    }
}
