//! Sends replies, from any thread and in any order.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;

use super::error::ServerError;
use crate::Errno;
use crate::transmission::SimpleReply;

/// Sends the replies to one client. Clones share its connection.
#[derive(Clone, Debug)]
pub struct Replier {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    socket: UnixStream,
    /// Held while a reply is written, so that it is sent in one piece.
    state: Mutex<State>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Open,
    Broken,
}

impl Replier {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { shared: Arc::new(Shared { socket, state: Mutex::new(State::Open) }) }
    }

    /// Tells the client that its request is done.
    ///
    /// # Errors
    /// If the connection has failed, as all later replies then do.
    pub fn ok(&self, cookie: u64) -> Result<(), ServerError> {
        self.answer(cookie, Ok(()))
    }

    /// Tells the client that its request failed.
    ///
    /// # Errors
    /// If the connection has failed, as all later replies then do.
    pub fn fail(&self, cookie: u64, errno: Errno) -> Result<(), ServerError> {
        self.answer(cookie, Err(errno))
    }

    /// Ends the connection now: threads that read from it or write to it wake.
    pub fn shut_down(&self) {
        // A failure means that the connection is closed already.
        let _ = self.shared.socket.shutdown(Shutdown::Both);
    }

    pub(super) fn answer(
        &self,
        cookie: u64,
        outcome: Result<(), Errno>,
    ) -> Result<(), ServerError> {
        let mut state = self.shared.state.lock();
        if *state == State::Broken {
            return Err(ServerError::Broken);
        }
        let reply = SimpleReply { cookie, outcome }.to_bytes();
        (&self.shared.socket).write_all(&reply).map_err(|error| {
            // Half of a reply may have been sent: nothing can follow it.
            *state = State::Broken;
            self.shut_down();
            ServerError::writing(error)
        })
    }
}
