//! A listener for clients that anyone on the network, or on the host, may be.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};

/// The pause after a failed accept, such as for lack of open files.
const RETRY: Duration = Duration::from_millis(200);

/// A listener that bounds the number of connections and their duration.
#[derive(Debug)]
pub struct Few {
    listener: TcpListener,
    places: Arc<Semaphore>,
    connection_max: Duration,
}

impl Few {
    /// At most so many connections at a time, and each for so long; others wait in the kernel.
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
                    return (Held { stream, over, _place: place }, address);
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
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Held {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.over.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use tokio::io::AsyncReadExt;

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
}
