//! What the destination's QEMU answers to the one here, and the one answer that is kept for
//! a while: its word that the VM may be stopped (SWITCHOVER_ACK).
//!
//! A QEMU from 8.1 on that libvirt gives the capability `switchover-ack` stops no running VM
//! before it has that word. So it is kept here until what is left fits the downtime goal.
//! Where none comes, QEMU stops the VM by itself, as ever.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;
use stream::return_path::{Follower, SWITCHOVER_ACK};

/// A destination has one, and from QEMU 11.1 on one for each device that asks for it.
const KEPT_MAX: usize = 1024;

pub(super) struct WayBack {
    state: Mutex<State>,
}

struct State {
    socket: UnixStream,
    answers: Follower,
    /// So many acknowledgements.
    kept: usize,
    /// None is kept any more.
    may_stop: bool,
}

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// QEMU has it.
    On,
    /// QEMU has all but its first acknowledgement: it does not stop the VM now.
    ButAcknowledgement,
    /// QEMU has it, and it says that the destination has loaded the VM.
    Loaded,
}

impl WayBack {
    pub(super) fn new(socket: UnixStream) -> Self {
        let answers = Follower::default();
        let state = State { socket, answers, kept: 0, may_stop: false };
        Self { state: Mutex::new(state) }
    }

    /// Passes on what the destination's QEMU has answered.
    pub(super) fn pass(&self, bytes: &[u8]) -> io::Result<Passed> {
        let mut state = self.state.lock();
        let (was_kept, was_loaded) = (state.kept > 0, state.is_loaded());
        let mut rest = Vec::with_capacity(bytes.len());
        let acks = state.answers.sift(bytes, &mut rest);
        state.kept += acks;
        // Its last word comes last.
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

    /// QEMU may stop the VM. Whether it has waited for that; if it is gone, others see that.
    pub(super) fn let_stop(&self) -> bool {
        let mut state = self.state.lock();
        state.may_stop = true;
        let was_kept = state.kept > 0;
        let _ = state.say_kept();
        was_kept
    }

    /// Whether QEMU waits for what is kept.
    pub(super) fn is_kept(&self) -> bool {
        self.state.lock().kept > 0
    }

    /// The destination has said that it has loaded the VM.
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

    /// What has come by now.
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
        // What comes later isn't kept, and nothing is said twice.
        assert_eq!(way.pass(&SWITCHOVER_ACK).unwrap(), Passed::On);
        assert!(!way.let_stop());
        assert_eq!(came(&mut qemu), SWITCHOVER_ACK);
        assert_eq!(way.pass(&SHUT).unwrap(), Passed::Loaded);
        assert!(way.is_loaded());
    }

    /// A VM that is paused is not waited for.
    #[test]
    fn the_last_word_is_never_kept_nor_overtaken() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let way = WayBack::new(ours);
        let said = [&SWITCHOVER_ACK[..], &PONG].concat();
        assert_eq!(way.pass(&said).unwrap(), Passed::ButAcknowledgement);
        assert_eq!(way.pass(&SHUT).unwrap(), Passed::Loaded);
        assert_eq!(came(&mut qemu), [&PONG[..], &SWITCHOVER_ACK, &SHUT].concat());
    }
}
