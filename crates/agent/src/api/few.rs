//! A listener for clients that anyone on the network, or on the host, may be.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// The pause after a failed accept, such as for lack of open files.
const RETRY: Duration = Duration::from_millis(200);

/// The longest time for a request that is in progress when the time of its connection has expired.
const REQUEST_MAX: Duration = Duration::from_secs(60);

/// A listener that bounds the number of connections and their duration.
#[derive(Debug)]
pub struct Few {
    listener: TcpListener,
    places: Arc<Semaphore>,
    connection_max: Duration,
}

impl Few {
    /// At most so many connections at a time, and each for so long, or until the request is answered
    /// that is in progress then; others wait in the kernel.
    #[must_use]
    pub fn new(listener: TcpListener, connections_max: usize, connection_max: Duration) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(connections_max)), connection_max }
    }
}

impl Listener for Few {
    type Io = Held;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await;
            match (self.listener.accept().await, place) {
                (Ok((stream, address)), Ok(place)) => {
                    let over = Box::pin(sleep(self.connection_max));
                    let held = Held {
                        stream,
                        over,
                        is_over: false,
                        is_requested: false,
                        is_answered: false,
                        _place: place,
                    };
                    return (held, address);
                }
                _ => sleep(RETRY).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection, and its place.
#[derive(Debug)]
pub struct Held {
    stream: TcpStream,
    over: Pin<Box<Sleep>>,
    /// Its time has expired, and only a request may be answered.
    is_over: bool,
    /// Something was read since the last answer...
    is_requested: bool,
    /// ... and something written since. Once that is flushed, it is the answer.
    is_answered: bool,
    _place: OwnedSemaphorePermit,
}

impl Held {
    /// An error when the connection is to end.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.over.as_mut().poll(context).is_ready() {
            if self.is_over || !self.is_requested {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.is_over = true;
            self.over.as_mut().reset(Instant::now() + REQUEST_MAX);
            // The timer wakes this task again.
            return self.check(context);
        }
        if self.is_over && !self.is_requested {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        self.is_requested |= buffer.filled().len() > before;
        Poll::Ready(read)
    }
}

impl AsyncWrite for Held {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.is_answered |= written.is_ok();
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(context));
        if std::mem::take(&mut self.is_answered) {
            self.is_requested = false;
        }
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn one_more_is_served_when_another_has_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut few = Few::new(listener, 2, Duration::from_secs(60));
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        let (first, _second) = (few.accept().await, few.accept().await);
        let mut third = pin!(few.accept());
        assert!(poll_fn(|context| Poll::Ready(third.as_mut().poll(context))).await.is_pending());
        drop(first);
        third.await;
    }

    #[tokio::test]
    async fn a_connection_ends_when_its_time_is_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut held, _) = Few::new(listener, 1, Duration::from_millis(1)).accept().await;
        let read = held.read(&mut [0; 1]).await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(client);
    }

    #[tokio::test]
    async fn a_request_in_progress_is_answered_first() {
        const TIME: Duration = Duration::from_millis(1);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut few = Few::new(listener, 1, TIME);
        let (mut held, _) = few.accept().await;
        client.write_all(b"GET").await.unwrap();
        // Its time may expire before anything was read, on a slow machine.
        held.is_requested = true;
        held.read_exact(&mut [0; 3]).await.unwrap();
        sleep(10 * TIME).await;
        {
            let mut more = [0; 1];
            let mut reading = pin!(held.read(&mut more));
            let read = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await;
            assert!(read.is_pending(), "{read:?}");
        }
        held.write_all(b"200").await.unwrap();
        held.flush().await.unwrap();
        let read = held.read(&mut [0; 1]).await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        client.read_exact(&mut [0; 3]).await.unwrap();
    }
}
