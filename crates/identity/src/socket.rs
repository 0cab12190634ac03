//! The socket below a connection, which both halves use and any thread can end.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::net::sockopt::set_tcp_user_timeout;

use crate::record::RecordError;

/// The state that both halves and all closers share.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    is_closed: AtomicBool,
}

impl Socket {
    pub(crate) fn shared(stream: TcpStream) -> Arc<Self> {
        Arc::new(Self { stream, is_closed: AtomicBool::new(false) })
    }

    /// Ends both directions; a blocked read or write returns.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Relaxed);
        // An error means that the connection is closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether this end has closed it.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }
}

/// Ends a connection from another thread.
#[derive(Clone, Debug)]
pub struct Closer {
    pub(crate) socket: Arc<Socket>,
}

impl Closer {
    /// Ends both directions at once: reads see the end, writes fail.
    pub fn close(&self) {
        self.socket.close();
    }

    /// Sets how long the peer may acknowledge nothing, bytes or keepalive probes, until the
    /// connection is broken.
    pub fn set_dead_after(&self, limit: Duration) -> io::Result<()> {
        let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        Ok(set_tcp_user_timeout(&self.socket.stream, limit_ms)?)
    }
}

/// An I/O error with the same text.
pub(crate) fn as_io(error: RecordError) -> io::Error {
    let kind = match error {
        RecordError::Refused(_) => io::ErrorKind::ConnectionAborted,
        _ => io::ErrorKind::InvalidData,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::net::sockopt::tcp_user_timeout;

    use super::*;

    #[test]
    fn a_peer_can_be_given_more_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let closer = Closer { socket: Socket::shared(stream) };
        closer.set_dead_after(Duration::from_secs(30)).unwrap();
        assert_eq!(tcp_user_timeout(&closer.socket.stream).unwrap(), 30_000);
    }
}
