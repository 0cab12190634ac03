//! The client that writes into the export of the destination's QEMU.
//!
//! Any thread may submit; `write` returns as soon as the data is in the socket,
//! and the caller may reuse its buffer. One thread reads the replies and returns
//! each request's tag with its outcome. At most [`Settings::in_flight_max`]
//! requests are unanswered; the next one waits. A request above the server's
//! maximum size is sent in parts, and its tag is returned after the last reply.
//!
//! **The client keeps no order.** The server may complete requests in any order,
//! so the caller waits for a write's outcome before it submits one that overlaps;
//! and a FLUSH covers only requests that were answered before it was sent.
//!
//! **The client doesn't request block sizes**, but keeps to those that the server
//! sends. On request QEMU sends the image's alignment and insists on it (4,096 with
//! O_DIRECT on such a disk); otherwise it accepts any offset and aligns by itself.
//! The source's guest writes with the alignment of its own disk.
//!
//! Zeroes are written without `NO_HOLE`, so that they may become holes. Whether
//! they do depends on the exported node: it must have `discard=unmap`, in the format
//! layer and in the file layer. QEMU 10 otherwise allocates space for zeroes, as with
//! a plain `-drive`.

mod error;
mod flight;
mod negotiate;
mod replies;
mod sender;
mod split;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use data_threads::DataThreads;
use parking_lot::{Condvar, Mutex};

pub use error::{ClientError, Failure, Outcome};
pub(crate) use flight::{Flight, Part};
pub use negotiate::ExportInfo;
pub(crate) use negotiate::{choose, negotiate};

/// How long the server may take for each message of the negotiation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many requests may be unanswered, 1 to 1,024.
    pub in_flight_max: usize,
    /// The name of the thread that reads replies.
    pub thread: String,
    /// The group of threads that it joins.
    pub threads: Option<Arc<DataThreads>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { in_flight_max: 64, thread: "nbd-replies".to_owned(), threads: None }
    }
}

/// A connection to one export. Dropping it stops it: unanswered requests fail.
#[derive(Debug)]
pub struct Client<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    /// Held while one request is sent, so that its parts and their
    /// payloads stay together.
    turn: Mutex<()>,
    info: ExportInfo,
    replies: Option<JoinHandle<()>>,
}

/// The state that submitting threads share with the one that reads replies.
#[derive(Debug)]
struct Shared<T> {
    socket: UnixStream,
    state: Mutex<State<T>>,
    /// Notified when a place is free, or the connection ended.
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    flight: Flight<T>,
    /// The first failure, after which the disk's content can't be trusted.
    first_failure: Option<Failure>,
    /// Why the connection is about to end; the thread that reads replies sees it end.
    ending: Option<Failure>,
    /// Why it ended; replies are no longer read.
    ended: Option<Failure>,
}

impl<T: Send + 'static> Client<T> {
    /// Connects to a server's unix socket and chooses an export. `on_done` is called
    /// with each tag and the outcome of its request, exactly once, on the thread that
    /// reads replies; it must not submit.
    ///
    /// # Errors
    /// If no server listens, or the export doesn't exist, is read-only or can't
    /// be flushed.
    pub fn connect(
        path: &Path,
        export: &str,
        settings: &Settings,
        on_done: impl FnMut(T, Outcome) + Send + 'static,
    ) -> Result<Self, ClientError> {
        let connected = UnixStream::connect(path);
        let socket =
            connected.map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Self::over(socket, export, settings, on_done)
    }

    /// As [`Client::connect`], over a connected socket.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn over(
        socket: UnixStream,
        export: &str,
        settings: &Settings,
        on_done: impl FnMut(T, Outcome) + Send + 'static,
    ) -> Result<Self, ClientError> {
        set_patience(&socket, Some(PATIENCE)).map_err(ClientError::Handshake)?;
        let info = negotiate(&socket, &socket, export)?;
        set_patience(&socket, None).map_err(ClientError::Handshake)?;
        let state = State {
            flight: Flight::new(settings.in_flight_max.clamp(1, 1024)),
            first_failure: None,
            ending: None,
            ended: None,
        };
        let shared = Arc::new(Shared { socket, state: Mutex::new(state), changed: Condvar::new() });
        let replies = thread::Builder::new()
            .name(settings.thread.clone())
            .spawn({
                let (shared, threads) = (Arc::clone(&shared), settings.threads.clone());
                move || {
                    let _member = threads.as_ref().map(DataThreads::join);
                    replies::read(&shared, on_done);
                }
            })
            .map_err(ClientError::Local)?;
        Ok(Self { shared, turn: Mutex::new(()), info, replies: Some(replies) })
    }

    /// What the server reports about the export.
    #[must_use]
    pub fn info(&self) -> &ExportInfo {
        &self.info
    }

    /// The first failure, if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.state.lock().first_failure.clone()
    }

    /// Ends the connection now: unanswered requests fail, and waiting calls wake.
    pub fn stop(&self) {
        self.shared.end(Failure::Stopped);
    }
}

impl<T: Send + 'static> Drop for Client<T> {
    fn drop(&mut self) {
        self.stop();
        if let Some(replies) = self.replies.take()
            && replies.join().is_err()
        {
            tracing::error!("the thread that reads NBD answers panicked");
        }
    }
}

impl<T> Shared<T> {
    /// Ends the connection. The thread that reads replies reports the unanswered
    /// requests.
    fn end(&self, why: Failure) {
        self.state.lock().ending.get_or_insert(why);
        // A failure means that the connection is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn set_patience(socket: &UnixStream, patience: Option<Duration>) -> io::Result<()> {
    socket.set_read_timeout(patience)?;
    socket.set_write_timeout(patience)
}

#[cfg(test)]
mod tests;
