//! The client that writes into the export of the destination's QEMU.
//!
//! Any thread submits; `write` returns as soon as the data is in the socket,
//! so the buffer is the caller's again. One thread reads the answers and hands
//! each request's tag back with its outcome. At most
//! [`Settings::in_flight_max`] requests are unanswered; who wants one more
//! waits. A request above the server's size goes out in parts, and its tag
//! comes back after the last of them.
//!
//! **Nobody keeps an order here.** The server may do what is in flight in any
//! order, so a write that overlaps another waits for that one's outcome first;
//! and a FLUSH covers only what was answered before it was sent.
//!
//! **We don't ask for block sizes**, but keep to what the server tells. Asked,
//! QEMU tells the image's alignment and insists on it (4,096 with O_DIRECT on
//! such a disk); not asked, it takes any offset and aligns by itself. The
//! other end's guest writes as its own disk wants it.
//!
//! Zeroes are written without `NO_HOLE`, so that they may become holes. Whether
//! they do is up to the exported node: it must have `discard=unmap`, in the
//! format's layer and the file's. QEMU 10 otherwise makes zeroes that take
//! space, as `-drive` without more does.

mod flight;
mod negotiate;
mod replies;
mod sender;
mod split;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use data_threads::DataThreads;
use parking_lot::{Condvar, Mutex};

use crate::handshake::BlockSizes;
use crate::transmission::Command;
use crate::{Errno, ExportFlags, ProtocolError};

pub(crate) use flight::{Flight, Part};
pub(crate) use negotiate::{choose, negotiate};

/// How long the server may take for each word of the negotiation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many requests may be unanswered, 1 to 1,024.
    pub in_flight_max: usize,
    /// The name of the thread that reads answers.
    pub thread: String,
    /// What that thread joins.
    pub threads: Option<Arc<DataThreads>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { in_flight_max: 64, thread: "nbd-replies".to_owned(), threads: None }
    }
}

/// What the server says of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its size.
    pub bytes: u64,
    /// Its abilities.
    pub flags: ExportFlags,
    /// The sizes that it wants to be kept to.
    pub sizes: BlockSizes,
}

/// There is no such client, or it can't take this request: nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("cannot connect to the NBD server at {}: {source}", path.display())]
    Connect {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The socket failed before an export was chosen.
    #[error("the NBD server left, or was silent, before it gave an export: {0}")]
    Handshake(io::Error),
    /// No thread can be had.
    #[error("cannot start a thread for an NBD client: {0}")]
    Local(io::Error),
    /// It breaks the rules.
    #[error("the NBD server breaks the protocol: {0}")]
    Server(#[from] ProtocolError),
    /// It does not give us the export.
    #[error("the NBD server refuses the export '{name}': {reason}")]
    Refused {
        /// Which.
        name: String,
        /// Its words.
        reason: String,
    },
    /// The export is no good for us.
    #[error("the NBD export '{name}' {lack}")]
    Unfit {
        /// Which.
        name: String,
        /// What it lacks.
        lack: &'static str,
    },
    /// Nothing, or not in the export.
    #[error("{bytes} bytes at {offset} do not lie in the NBD export of {export_bytes} bytes")]
    Outside {
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// The export's size.
        export_bytes: u64,
    },
    /// The server told a minimum that this doesn't keep to.
    #[error("{bytes} bytes at {offset} are not aligned to the NBD export's {minimum} bytes")]
    Unaligned {
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// The server's minimum.
        minimum: u32,
    },
    /// It broke before.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// Why a request did not do what it should, or may not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The server answered so.
    #[error("the destination's disk did not {} {bytes} bytes at {offset}: {errno}", verb(*command))]
    Disk {
        /// What it should do.
        command: Command,
        /// Where.
        offset: u64,
        /// How much.
        bytes: u32,
        /// What it said.
        errno: Errno,
    },
    /// The connection ended; whether the request was done is unknown.
    #[error("the connection to the destination's disk broke: {0}")]
    Broken(String),
    /// The client was stopped by its owner.
    #[error("writing to the destination's disk was stopped")]
    Stopped,
}

fn verb(command: Command) -> &'static str {
    match command {
        Command::WRITE => "write",
        Command::WRITE_ZEROES => "zero",
        _ => "flush",
    }
}

/// How a request ended.
pub type Outcome = Result<(), Failure>;

/// A connection to one export. Dropping it stops it: what is unanswered fails.
#[derive(Debug)]
pub struct Client<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    /// Held while one submission goes out, so that its parts and their
    /// payloads stay together.
    turn: Mutex<()>,
    info: ExportInfo,
    replies: Option<JoinHandle<()>>,
}

/// What the submitting threads and the one that reads answers share.
#[derive(Debug)]
struct Shared<T> {
    socket: UnixStream,
    state: Mutex<State<T>>,
    /// A place in flight is free, or nothing is under way, or it broke.
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    flight: Flight<Done<T>>,
    /// Submitted, and its outcome not reported yet.
    unfinished: usize,
    /// The first thing that went wrong; what it was meant for can't be trusted.
    first_failure: Option<Failure>,
    /// Why the connection is about to end; the reader of answers sees it end.
    ending: Option<Failure>,
    /// It ended, and nobody reads answers any more.
    ended: Option<Failure>,
}

/// Who wants to know of an outcome.
#[derive(Debug)]
enum Done<T> {
    Owner(T),
    Waiter(mpsc::SyncSender<Outcome>),
}

impl<T: Send + 'static> Client<T> {
    /// Connects to a server's unix socket and chooses an export. `on_done`
    /// gets each tag with the outcome of its request, just once, on the thread
    /// that reads answers; it must not submit.
    ///
    /// # Errors
    /// If nobody listens, or the export isn't there, can't be written or can't
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

    /// As [`Client::connect`], over a socket that is connected.
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
            unfinished: 0,
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

    /// What the server says of the export.
    #[must_use]
    pub fn info(&self) -> &ExportInfo {
        &self.info
    }

    /// The first thing that went wrong, if anything did.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.state.lock().first_failure.clone()
    }

    /// Waits until all that was submitted is done, and then until the server
    /// has made it durable. Others who submit wait meanwhile.
    ///
    /// # Errors
    /// With the first thing that went wrong since the client connected: then
    /// the disk is not what it should be.
    pub fn sync(&self) -> Outcome {
        let flushed = {
            let turn = self.turn.lock();
            self.shared.wait_finished();
            let (done, flushed) = mpsc::sync_channel(1);
            match self.submit_flush(&turn, Done::Waiter(done)) {
                Ok(()) => flushed,
                Err(ClientError::Failed(failure)) => return Err(failure),
                Err(error) => return Err(Failure::Broken(error.to_string())),
            }
        };
        let outcome = flushed
            .recv()
            .unwrap_or_else(|_| Err(Failure::Broken("its reader of answers died".to_owned())));
        outcome.and_then(|()| self.failure().map_or(Ok(()), Err))
    }

    /// Waits until all that was submitted is done, says goodbye and ends.
    /// What is done is durable only after [`Client::sync`].
    ///
    /// # Errors
    /// With the first thing that went wrong since the client connected.
    pub fn finish(mut self) -> Outcome {
        {
            let turn = self.turn.lock();
            self.shared.wait_finished();
            let mut state = self.shared.state.lock();
            // From here on, the connection's end is no failure.
            state.ending.get_or_insert(Failure::Stopped);
            drop(state);
            self.say_goodbye(&turn);
        }
        self.join();
        self.failure().map_or(Ok(()), Err)
    }

    /// Ends the connection now. What is unanswered fails, who waits wakes.
    pub fn stop(&self) {
        self.shared.end(Failure::Stopped);
    }

    fn join(&mut self) {
        self.stop();
        if let Some(replies) = self.replies.take()
            && replies.join().is_err()
        {
            tracing::error!("the thread that reads NBD answers panicked");
        }
    }
}

impl<T: Send + 'static> Drop for Client<T> {
    fn drop(&mut self) {
        self.join();
    }
}

impl<T> Shared<T> {
    /// The connection is over. The thread that reads answers reports what was
    /// under way.
    fn end(&self, why: Failure) {
        self.state.lock().ending.get_or_insert(why);
        // If it fails the connection is gone already, which is what we want.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Waits until every outcome is reported.
    fn wait_finished(&self) {
        let mut state = self.state.lock();
        while state.unfinished > 0 && state.ended.is_none() {
            self.changed.wait(&mut state);
        }
    }
}

fn set_patience(socket: &UnixStream, patience: Option<Duration>) -> io::Result<()> {
    socket.set_read_timeout(patience)?;
    socket.set_write_timeout(patience)
}

#[cfg(test)]
mod tests;
