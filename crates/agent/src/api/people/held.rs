//! A connection of a person that has shown a certificate: its place among the others, and how
//! long it may be without a request.
//!
//! A request takes as long as the work that it orders. Everything else has a limit: to send a
//! request, to take nothing of an answer whose length is known, to send nothing. Answers without
//! an end have limits of their own.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::shares::Share;

/// How long a connection may have no request that is being answered.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(60);

/// The requests of one connection, one after the other.
#[derive(Debug, Default)]
pub(super) struct Requests {
    started: AtomicUsize,
    ended: AtomicUsize,
}

/// A request that is being answered, until this is dropped.
pub(super) struct Answering(Arc<Requests>);

impl Requests {
    pub(super) fn begin(self: &Arc<Self>) -> Answering {
        self.started.fetch_add(1, SeqCst);
        Answering(Arc::clone(self))
    }
}

impl Answering {
    /// The request's response. If its length is not known, such as that of events, the request is
    /// being answered until all of it is sent.
    pub(super) fn until_sent(self, response: Response) -> Response {
        if response.body().size_hint().exact().is_some() {
            return response;
        }
        response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _ = &self;
                frame
            }))
        })
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, SeqCst);
    }
}

/// The connection.
pub(super) struct Held<S> {
    stream: S,
    pub(super) requests: Arc<Requests>,
    idle_max: Duration,
    /// The number of requests when the present wait began.
    waits_since: usize,
    /// The end of the present wait.
    over: Option<Pin<Box<Sleep>>>,
    _place: Share,
}

impl<S> Held<S> {
    pub(super) fn new(stream: S, place: Share) -> Self {
        let requests = Arc::default();
        Self { stream, requests, idle_max: IDLE_MAX, waits_since: 0, over: None, _place: place }
    }

    /// Ready once there has been no request for too long. To be called when the stream isn't
    /// ready.
    fn poll_idle(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let started = self.requests.started.load(SeqCst);
        if self.requests.ended.load(SeqCst) != started {
            self.over = None;
            return Poll::Pending;
        }
        if std::mem::replace(&mut self.waits_since, started) != started {
            self.over = None;
        }
        let idle_max = self.idle_max;
        let over = self.over.get_or_insert_with(|| Box::pin(sleep(idle_max)));
        over.as_mut().poll(context).map(|()| io::ErrorKind::TimedOut.into())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Held<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.poll_idle(context).map(Err),
            read => read,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Held<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(context, bytes) {
            Poll::Pending => self.poll_idle(context).map(Err),
            written => {
                // A long answer takes its time on a slow link.
                self.over = None;
                written
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_flush(context) {
            Poll::Pending => self.poll_idle(context).map(Err),
            flushed => flushed,
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_shutdown(context) {
            Poll::Pending => self.poll_idle(context).map(Err),
            shut => shut,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use axum::response::IntoResponse;
    use http_body_util::channel::Channel;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;
    use crate::shares::Shares;

    fn held() -> (Held<DuplexStream>, DuplexStream) {
        let (stream, client) = duplex(16);
        let place = Shares::new(1, 1).take("ann").unwrap();
        (Held { idle_max: Duration::from_millis(10), ..Held::new(stream, place) }, client)
    }

    async fn ends(held: &mut Held<DuplexStream>) -> bool {
        let read = held.read(&mut [0; 16]).await;
        read.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
    }

    /// Polls once for input, of which there is none.
    async fn waits(held: &mut Held<DuplexStream>) -> bool {
        let mut bytes = [0; 16];
        let mut read = std::pin::pin!(held.read(&mut bytes));
        poll_fn(|context| Poll::Ready(read.as_mut().poll(context).is_pending())).await
    }

    #[tokio::test]
    async fn a_connection_without_a_request_ends() {
        let (mut held, mut client) = held();
        // A part of a request is none.
        client.write_all(b"GET /v1").await.unwrap();
        assert_eq!(held.read(&mut [0; 16]).await.unwrap(), 7);
        assert!(ends(&mut held).await);
    }

    #[tokio::test]
    async fn a_request_takes_as_long_as_it_takes() {
        let (mut held, _client) = held();
        assert!(waits(&mut held).await && held.over.is_some());
        let answering = held.requests.begin();
        assert!(waits(&mut held).await && held.over.is_none());
        // An answer that goes on, and one that ends.
        let (_lines, lines) = Channel::<axum::body::Bytes, io::Error>::new(1);
        let response = answering.until_sent(Body::new(lines).into_response());
        assert!(waits(&mut held).await && held.over.is_none());
        drop(response);
        assert!(ends(&mut held).await);
    }

    #[tokio::test]
    async fn each_request_begins_a_new_wait() {
        let (mut held, _client) = held();
        assert!(waits(&mut held).await);
        let before = held.over.as_ref().unwrap().deadline();
        let answering = held.requests.begin();
        let _response = answering.until_sent("an answer".into_response());
        assert!(waits(&mut held).await);
        assert!(held.over.as_ref().unwrap().deadline() >= before);
        assert_eq!(held.waits_since, 1);
    }

    #[tokio::test]
    async fn an_answer_that_is_taken_slowly_goes_on() {
        let (mut held, mut client) = held();
        held.write_all(&[0; 16]).await.unwrap();
        assert!(waits(&mut held).await && held.over.is_some());
        assert_eq!(client.read(&mut [0; 16]).await.unwrap(), 16);
        held.write_all(&[0; 16]).await.unwrap();
        assert!(held.over.is_none());
    }

    #[tokio::test]
    async fn an_answer_that_is_not_taken_ends_the_connection() {
        let (mut held, _client) = held();
        let answering = held.requests.begin();
        drop(answering.until_sent("an answer".into_response()));
        let written = held.write_all(&[0; 17]).await;
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
