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
    words: Mutex<Words>,
    said: Condvar,
}

#[derive(Debug, Default)]
struct Words {
    /// The main channel, from its connection until all answers are sent.
    socket: Option<UnixStream>,
    allowed: bool,
    /// QEMU was told that it is allowed.
    told_allowed: bool,
    /// QEMU had ended its RAM section before it was allowed to.
    early: bool,
    over: bool,
}

impl Answer {
    /// The main channel has connected.
    pub(crate) fn open(&self, socket: UnixStream) {
        let mut words = self.words.lock();
        words.socket = Some(socket);
        words.say();
    }

    /// QEMU may stop the VM. It still doesn't end its migration.
    pub(crate) fn allow(&self) {
        self.allow_with(&mut self.words.lock());
    }

    /// QEMU may stop the VM, and end its migration.
    pub(crate) fn let_finish(&self) {
        let mut words = self.words.lock();
        self.allow_with(&mut words);
        self.finish(&mut words);
    }

    /// QEMU has ended its RAM section.
    pub(crate) fn ram_ended(&self) {
        let mut words = self.words.lock();
        words.early = !words.allowed;
    }

    /// Whether QEMU ended its RAM section before it was allowed to.
    pub(crate) fn was_early(&self) -> bool {
        self.words.lock().early
    }

    /// Ends the answers: a QEMU that was not allowed to stop the VM won't stop it, but can
    /// end its migration in another way.
    pub(crate) fn end(&self) {
        self.finish(&mut self.words.lock());
    }

    fn allow_with(&self, words: &mut Words) {
        words.allowed |= !words.over;
        words.say();
        self.said.notify_all();
    }

    fn finish(&self, words: &mut Words) {
        words.over = true;
        words.say();
        self.said.notify_all();
    }

    /// Waits for `time`, or until QEMU may stop the VM or never will.
    pub(crate) fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut words = self.words.lock();
        while !words.allowed && !words.over && !self.said.wait_until(&mut words, until).timed_out()
        {
        }
    }
}

impl Words {
    /// Sends the answers that are due and not yet sent. They are twelve bytes, the first
    /// ever in this direction, so they fit into the socket's buffer. If QEMU has exited,
    /// its stream ends.
    fn say(&mut self) {
        let Some(socket) = &self.socket else { return };
        let mut words = Vec::with_capacity(SWITCHOVER_ACK.len() + SHUT.len());
        if self.allowed && !std::mem::replace(&mut self.told_allowed, true) {
            words.extend_from_slice(&SWITCHOVER_ACK);
        }
        if self.over {
            words.extend_from_slice(&SHUT);
        }
        if !words.is_empty() {
            let _ = send(socket, &words, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        if self.over {
            self.socket = None;
        }
    }
}
