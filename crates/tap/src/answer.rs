//! Answers QEMU on its main channel's return path, in place of a destination.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::net::{SendFlags, send};
use stream::return_path::{SHUT, SWITCHOVER_ACK};

/// The return path to a QEMU that listens (capabilities `return-path` and
/// `switchover-ack`): it stops a running VM only once it is allowed to, and ends its
/// migration only once the answers have ended.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The main channel, from its connection until all answers are sent.
    socket: Option<UnixStream>,
    permission: Permission,
    /// QEMU had ended its RAM section before it was allowed to.
    early: bool,
    /// No other answer follows.
    ended: bool,
}

/// QEMU's permission to stop the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Permission {
    #[default]
    Withheld,
    /// It is not sent yet.
    Granted,
    Sent,
}

impl Answer {
    /// The main channel has connected.
    pub(crate) fn open(&self, socket: UnixStream) {
        let mut state = self.state.lock();
        state.socket = Some(socket);
        state.send();
    }

    /// QEMU may stop the VM. It still doesn't end its migration.
    pub(crate) fn allow(&self) {
        self.allow_with(&mut self.state.lock());
    }

    /// QEMU may stop the VM, and end its migration.
    pub(crate) fn let_finish(&self) {
        let mut state = self.state.lock();
        self.allow_with(&mut state);
        self.finish(&mut state);
    }

    /// QEMU has ended its RAM section.
    pub(crate) fn ram_ended(&self) {
        let mut state = self.state.lock();
        state.early = state.permission == Permission::Withheld;
    }

    /// Whether QEMU ended its RAM section before it was allowed to.
    pub(crate) fn was_early(&self) -> bool {
        self.state.lock().early
    }

    /// Ends the answers: a QEMU that was not allowed to stop the VM won't stop it, but can
    /// end its migration in another way.
    pub(crate) fn end(&self) {
        self.finish(&mut self.state.lock());
    }

    fn allow_with(&self, state: &mut State) {
        if state.permission == Permission::Withheld && !state.ended {
            state.permission = Permission::Granted;
        }
        state.send();
        self.changed.notify_all();
    }

    fn finish(&self, state: &mut State) {
        state.ended = true;
        state.send();
        self.changed.notify_all();
    }

    /// Waits for `time`, or until QEMU may stop the VM or never will.
    pub(crate) fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while state.permission == Permission::Withheld && !state.ended {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

impl State {
    /// Sends the answers that are due and not yet sent. They are twelve bytes, the first
    /// ever in this direction, so they fit into the socket's buffer. If QEMU has exited,
    /// its stream ends.
    fn send(&mut self) {
        let Some(socket) = &self.socket else { return };
        let mut answers = Vec::with_capacity(SWITCHOVER_ACK.len() + SHUT.len());
        if self.permission == Permission::Granted {
            self.permission = Permission::Sent;
            answers.extend_from_slice(&SWITCHOVER_ACK);
        }
        if self.ended {
            answers.extend_from_slice(&SHUT);
        }
        if !answers.is_empty() {
            let _ = send(socket, &answers, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        if self.ended {
            self.socket = None;
        }
    }
}
