//! Answers, from any thread and in any order.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;

use super::ServerError;
use crate::Errno;
use crate::transmission::SimpleReply;

/// Where the answers to one client go. Clones are the same.
#[derive(Clone, Debug)]
pub struct Replier {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    socket: UnixStream,
    /// Held while an answer is written, so that it goes out in one piece.
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
    /// If the client can't be reached any more; then it never can.
    pub fn ok(&self, cookie: u64) -> Result<(), ServerError> {
        self.answer(cookie, Ok(()))
    }

    /// Tells the client that its request failed.
    ///
    /// # Errors
    /// If the client can't be reached any more; then it never can.
    pub fn fail(&self, cookie: u64, errno: Errno) -> Result<(), ServerError> {
        self.answer(cookie, Err(errno))
    }

    /// Ends the connection now: whoever reads from it or writes to it wakes.
    pub fn shut_down(&self) {
        // If it fails the connection is gone already, which is what we want.
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
            // Half of an answer may be out: nothing sensible can follow it.
            *state = State::Broken;
            self.shut_down();
            ServerError::writing(error)
        })
    }
}
