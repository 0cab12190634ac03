//! `/metrics`, as a path of the API and, if the operator configures it, at a separate address for
//! clients without a certificate.
//!
//! It shows which VMs move and how fast, and takes no orders.

mod cached;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep};

use super::{Api, answer};
use crate::denied::Denied;
use crate::metrics::Now;
pub(crate) use cached::CachedText;

/// Connections to that address at a time, so that idle ones can't use up the agent's open
/// files.
const CONNECTIONS_MAX: usize = 32;
/// The longest duration of a connection; a reader of metrics connects again.
const CONNECTION_MAX: Duration = Duration::from_secs(60);
/// The pause after a failed accept, such as for lack of open files.
const RETRY: Duration = Duration::from_millis(200);

/// Prometheus' text format, which all its readers accept.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) async fn metrics(State(api): State<Api>) -> Response {
    let cached = api.metrics.clone();
    match cached.read(move || collected(&api)).await {
        Some(text) => ([(CONTENT_TYPE, TEXT)], text).into_response(),
        None => answer::refusal(&Denied::Local(
            "the metrics can't be collected now: the agent's log may say more".to_owned(),
        )),
    }
}

fn collected(api: &Api) -> String {
    let now = Now {
        vms: api.registry.list(),
        migrations: api.migrations.moving(),
        buffers: api.migrations.buffers(),
        certificate_until_s: api.identity.as_ref().map(|one| one.validity().not_after_s),
    };
    api.migrations.metrics().text(&now)
}

/// Serves only metrics at `listener` until the API is closed.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    api: Api,
    mut closed: watch::Receiver<bool>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new().route("/metrics", get(metrics)).with_state(api);
    let listener = Few {
        listener: TcpListener::from_std(listener)?,
        places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
    };
    axum::serve(listener, router)
        .with_graceful_shutdown(async move {
            // An error means that the sender was dropped, which is an end as well.
            let _ = closed.wait_for(|closing| *closing).await;
        })
        .await
}

/// A listener that bounds the number of connections and their duration.
struct Few {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Listener for Few {
    type Io = Held;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await;
            match (self.listener.accept().await, place) {
                (Ok((stream, address)), Ok(place)) => {
                    let over = Box::pin(sleep(CONNECTION_MAX));
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
struct Held {
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

    use super::*;

    #[tokio::test]
    async fn one_more_is_served_when_another_has_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut few = Few { listener, places: Arc::new(Semaphore::new(2)) };
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
}
