//! Relays the destination QEMU's answers to the one here, and holds one of them back for a
//! while: the permission to stop the VM (SWITCHOVER_ACK).
//!
//! A QEMU from 8.1 on to which libvirt gives the capability `switchover-ack` does not stop a
//! running VM before that permission. So it is held back until what is left fits the
//! downtime goal. Without the capability QEMU stops the VM by itself, as ever.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;
use stream::return_path::{Follower, SWITCHOVER_ACK};

/// Most acknowledgements kept: a destination sends one, and from QEMU 11.1 on one for each
/// device that requests it.
const KEPT_MAX: usize = 1024;

pub(super) struct WayBack {
    state: Mutex<State>,
}

struct State {
    socket: UnixStream,
    answers: Follower,
    /// The number of acknowledgements kept.
    kept: usize,
    /// No acknowledgement is kept any more.
    may_stop: bool,
}

/// The outcome for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// QEMU has received it.
    On,
    /// QEMU has received it except its first acknowledgement, so it does not stop the VM
    /// now.
    ButAcknowledgement,
    /// QEMU has received it, and it shows that the destination has loaded the VM.
    Loaded,
}

impl WayBack {
    pub(super) fn new(socket: UnixStream) -> Self {
        let answers = Follower::default();
        let state = State { socket, answers, kept: 0, may_stop: false };
        Self { state: Mutex::new(state) }
    }

    /// Passes on an answer of the destination's QEMU.
    pub(super) fn pass(&self, bytes: &[u8]) -> io::Result<Passed> {
        let mut state = self.state.lock();
        let (was_kept, was_loaded) = (state.kept > 0, state.is_loaded());
        let mut rest = Vec::with_capacity(bytes.len());
        let acks = state.answers.sift(bytes, &mut rest);
        state.kept += acks;
        // SHUT comes last.
        state.may_stop |= state.answers.shut().is_some() || state.kept > KEPT_MAX;
        state.say_kept()?;
        state.socket.write_all(&rest)?;
        Ok(if state.is_loaded() && !was_loaded {
            Passed::Loaded
        } else if state.kept > 0 && !was_kept {
            Passed::ButAcknowledgement
        } else {
            Passed::On
        })
    }

    /// Permits QEMU to stop the VM. Returns whether QEMU was waiting for that; a QEMU that
    /// has ended is noticed elsewhere.
    pub(super) fn let_stop(&self) -> bool {
        let mut state = self.state.lock();
        state.may_stop = true;
        let was_kept = state.kept > 0;
        let _ = state.say_kept();
        was_kept
    }

    /// Whether QEMU waits for a kept acknowledgement.
    pub(super) fn is_kept(&self) -> bool {
        self.state.lock().kept > 0
    }

    /// Whether the destination has reported that it loaded the VM.
    pub(super) fn is_loaded(&self) -> bool {
        self.state.lock().is_loaded()
    }
}

impl State {
    fn is_loaded(&self) -> bool {
        self.answers.shut() == Some(0)
    }

    fn say_kept(&mut self) -> io::Result<()> {
        while self.may_stop && self.kept > 0 {
            self.socket.write_all(&SWITCHOVER_ACK)?;
            self.kept -= 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use stream::return_path::SHUT;

    use super::*;

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];

    /// The bytes received so far.
    fn came(qemu: &mut UnixStream) -> Vec<u8> {
        qemu.set_nonblocking(true).unwrap();
        let mut came = vec![0; 64];
        let count = qemu.read(&mut came).unwrap_or(0);
        came.truncate(count);
        came
    }

    #[test]
    fn an_acknowledgement_is_kept_until_the_vm_may_be_stopped() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let way = WayBack::new(ours);
        assert_eq!(way.pass(&PONG).unwrap(), Passed::On);
        assert_eq!(way.pass(&SWITCHOVER_ACK[..2]).unwrap(), Passed::On);
        let rest = [&SWITCHOVER_ACK[2..], &PONG].concat();
        assert_eq!(way.pass(&rest).unwrap(), Passed::ButAcknowledgement);
        assert!(way.is_kept());
        assert_eq!(came(&mut qemu), [PONG, PONG].concat());
        assert!(way.let_stop() && !way.is_kept());
        assert_eq!(came(&mut qemu), SWITCHOVER_ACK);
        // A later one isn't kept, and nothing is sent twice.
        assert_eq!(way.pass(&SWITCHOVER_ACK).unwrap(), Passed::On);
        assert!(!way.let_stop());
        assert_eq!(came(&mut qemu), SWITCHOVER_ACK);
        assert_eq!(way.pass(&SHUT).unwrap(), Passed::Loaded);
        assert!(way.is_loaded());
    }

    /// QEMU is not kept waiting for a paused VM.
    #[test]
    fn shut_is_never_kept_nor_overtaken() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let way = WayBack::new(ours);
        let said = [&SWITCHOVER_ACK[..], &PONG].concat();
        assert_eq!(way.pass(&said).unwrap(), Passed::ButAcknowledgement);
        assert_eq!(way.pass(&SHUT).unwrap(), Passed::Loaded);
        assert_eq!(came(&mut qemu), [&PONG[..], &SWITCHOVER_ACK, &SHUT].concat());
    }
}
