//! The reading half of a connection.

use std::io::{self, Read};

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::inbox::{Inbox, Taken};
use crate::keys::Keys;
use crate::socket::{Closer, Socket, as_io};

/// Time without bytes after which memory to receive into is given back.
const SILENT: Duration = Duration::from_secs(1);

/// The half that one thread reads from.
pub struct Reader {
    socket: Arc<Socket>,
    tls: Option<Box<Tls>>,
    /// When all that is being read must have arrived.
    deadline: Option<Instant>,
}

struct Tls {
    inbox: Inbox,
    keys: Arc<Keys>,
    /// A read is woken after [`SILENT`], to give memory back.
    is_woken: bool,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("stream", &self.socket.stream)
            .field("is_secured", &self.tls.is_some())
            .finish()
    }
}

impl Reader {
    pub(crate) fn plain(socket: Arc<Socket>) -> Self {
        Self { socket, tls: None, deadline: None }
    }

    pub(crate) fn secured(socket: Arc<Socket>, inbox: Inbox, keys: Arc<Keys>) -> Self {
        Self { socket, tls: Some(Box::new(Tls { inbox, keys, is_woken: false })), deadline: None }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Reads what has arrived, without waiting: `None` if there is nothing, 0 at
    /// the end.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn read_ready(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let Self { socket, tls, .. } = self;
        match tls {
            None => receive(socket, into, RecvFlags::DONTWAIT),
            Some(tls) => tls.read(socket, into, RecvFlags::DONTWAIT, None),
        }
    }

    /// Sets how long a read waits for bytes; `None` is for ever. A read that timed out
    /// has lost nothing, and can be repeated.
    pub fn set_timeout(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.is_woken = false;
        }
        self.socket.stream.set_read_timeout(limit)
    }

    /// Sets when all that is read from now on must have arrived; `None` is no deadline.
    /// Unlike a timeout it also stops a peer that sends a byte now and then.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        if deadline.is_none() { self.set_timeout(None) } else { Ok(()) }
    }

    /// A handle that ends the connection from any thread.
    #[must_use]
    pub fn closer(&self) -> Closer {
        Closer { socket: Arc::clone(&self.socket) }
    }
}

impl Read for Reader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Self { socket, tls, deadline } = self;
        match tls {
            None => {
                hurry(socket, *deadline)?;
                (&socket.stream).read(into)
            }
            Some(tls) => match tls.read(socket, into, RecvFlags::empty(), *deadline)? {
                Some(bytes) => Ok(bytes),
                // Only after the socket's own timeout.
                None => Err(io::ErrorKind::WouldBlock.into()),
            },
        }
    }
}

impl Tls {
    fn read(
        &mut self,
        socket: &Socket,
        into: &mut [u8],
        flags: RecvFlags,
        deadline: Option<Instant>,
    ) -> io::Result<Option<usize>> {
        if into.is_empty() {
            return Ok(Some(0));
        }
        loop {
            match self.inbox.take(into, &self.keys).map_err(as_io)? {
                Taken::Bytes(bytes) => return Ok(Some(bytes)),
                Taken::Ended => return Ok(Some(0)),
                Taken::Nothing => {}
            }
            hurry(socket, deadline)?;
            let may_wait = flags.is_empty() && deadline.is_none();
            if may_wait {
                self.wake_if_silent(socket)?;
            }
            match receive(socket, self.inbox.room(), flags)? {
                None if may_wait && self.is_woken => self.rest(socket)?,
                None => return Ok(None),
                Some(0) if socket.is_closed() => return Ok(Some(0)),
                // A peer announces its end; without that, the connection was cut.
                Some(0) => {
                    let cut = "the connection was cut: its peer did not end it";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, cut));
                }
                Some(bytes) => self.inbox.came(bytes),
            }
        }
    }

    /// Limits the next reads while there is memory to give back, unless the caller limits them.
    fn wake_if_silent(&mut self, socket: &Socket) -> io::Result<()> {
        if !self.is_woken && self.inbox.is_large() && socket.stream.read_timeout()?.is_none() {
            socket.stream.set_read_timeout(Some(SILENT))?;
            self.is_woken = true;
        }
        Ok(())
    }

    fn rest(&mut self, socket: &Socket) -> io::Result<()> {
        self.inbox.shrink();
        self.is_woken = false;
        socket.stream.set_read_timeout(None)
    }
}

/// Limits the next read to the time that is left.
fn hurry(socket: &Socket, deadline: Option<Instant>) -> io::Result<()> {
    let Some(deadline) = deadline else { return Ok(()) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    socket.stream.set_read_timeout(Some(left))
}

fn receive(socket: &Socket, into: &mut [u8], flags: RecvFlags) -> io::Result<Option<usize>> {
    loop {
        match recv(&socket.stream, &mut *into, flags) {
            Ok((_, bytes)) => return Ok(Some(bytes)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
