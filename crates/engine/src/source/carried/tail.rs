//! The tail of a carried migration: it may flow only once the audit has succeeded, and waits here
//! until then.

use std::mem;
use std::sync::Arc;

use page::Reserve;
use parking_lot::{Condvar, Mutex};
use tap::Stopped;
use wire::ToDestination;

use crate::error::LinkError;
use crate::link::Link;
use crate::tail;

/// The stream after the pages that go on lanes. While the destination compares those, it is
/// sent nothing else.
pub(super) struct Tail {
    memory: Arc<Reserve>,
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    /// It is sent; the destination keeps it until all pages are placed.
    Sent,
    /// All pages are placed, and compared: it is kept here.
    Compared(tail::Tail),
    /// All pages are as they should be: what is sent goes straight to QEMU.
    Flows,
    /// The migration has ended: nothing more is sent.
    Ended,
}

impl Tail {
    pub(super) fn new(memory: &Arc<Reserve>) -> Self {
        let (state, changed) = (Mutex::new(State::Sent), Condvar::new());
        Self { memory: Arc::clone(memory), state, changed }
    }

    /// Reports that everything is placed. If there is an audit, later bytes are kept until
    /// [`Tail::go_on`].
    pub(super) fn placed(
        &self,
        link: &Link<ToDestination>,
        audit: Vec<u64>,
    ) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        *state = if audit.is_empty() {
            State::Flows
        } else {
            State::Compared(tail::Tail::new(&self.memory))
        };
        self.changed.notify_all();
        link.send(&ToDestination::Placed { audit })
    }

    /// Continues after a successful audit.
    pub(super) fn go_on(&self, link: &Link<ToDestination>) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        let before = mem::replace(&mut *state, State::Flows);
        self.changed.notify_all();
        let kept = if let State::Compared(kept) = &before { kept.bytes() } else { &[] };
        link.non_ram(false, kept)
    }

    /// Ends all waiting.
    pub(super) fn end(&self) {
        *self.state.lock() = State::Ended;
        self.changed.notify_all();
    }

    /// Passes on a piece, or keeps it.
    pub(super) fn pass(&self, link: &Link<ToDestination>, bytes: &[u8]) -> Result<(), Stopped> {
        let mut state = self.state.lock();
        match &mut *state {
            State::Sent | State::Flows => link.non_ram(false, bytes).map_err(|_| Stopped),
            State::Compared(kept) => {
                if kept.push(bytes).is_ok() {
                    return Ok(());
                }
                // There is no room for it, or no memory.
                drop(state);
                self.pass_on(link, bytes)
            }
            State::Ended => Err(Stopped),
        }
    }

    /// The same for what is not kept: waits until it can go straight to QEMU.
    pub(super) fn pass_on(&self, link: &Link<ToDestination>, bytes: &[u8]) -> Result<(), Stopped> {
        let mut state = self.state.lock();
        loop {
            match *state {
                State::Sent | State::Compared(_) => self.changed.wait(&mut state),
                State::Flows => break,
                State::Ended => return Err(Stopped),
            }
        }
        drop(state);
        link.non_ram(false, bytes).map_err(|_| Stopped)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use identity::Connection;
    use wire::{Frame, ToSource, read_frame};

    use super::*;

    static PIECE: [u8; 1 << 20] = [7; 1 << 20];

    /// A link to a destination, and the connection's other end.
    fn link() -> (Link<ToDestination>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let (link, _) = Link::start::<ToSource>(Connection::plain(here), "peer").unwrap();
        (link, there)
    }

    /// How many bytes of a tail come before the connection ends.
    fn tail_bytes(mut there: &TcpStream) -> usize {
        let mut count = 0;
        while let Ok(Some(frame)) = read_frame(&mut there) {
            if let Frame::Tail(bytes) = frame {
                count += bytes.len();
            }
        }
        count
    }

    #[test]
    fn all_that_is_kept_during_audits_has_a_limit_and_the_rest_waits() {
        const EACH: usize = 24;
        let max_bytes = 16 << 20;
        let reserve = Reserve::new(max_bytes);
        let tails: Vec<Tail> = (0..3).map(|_| Tail::new(&reserve)).collect();
        let (links, theirs): (Vec<_>, Vec<_>) = tails.iter().map(|_| link()).unzip();
        for (tail, link) in tails.iter().zip(&links) {
            tail.placed(link, vec![1]).unwrap();
        }
        let kept_bytes = || {
            let kept = |tail: &Tail| match &*tail.state.lock() {
                State::Compared(kept) => kept.bytes().len(),
                State::Sent | State::Flows | State::Ended => 0,
            };
            tails.iter().map(kept).sum::<usize>()
        };
        thread::scope(|scope| {
            let read: Vec<_> =
                theirs.iter().map(|there| scope.spawn(move || tail_bytes(there))).collect();
            let passing: Vec<_> = tails
                .iter()
                .zip(&links)
                .map(|(tail, link)| {
                    scope.spawn(move || (0..EACH).try_for_each(|_| tail.pass(link, &PIECE)))
                })
                .collect();
            // Each has its own part, and one of them all that is shared.
            let most = max_bytes + tails.len() * (2 << 20);
            while kept_bytes() < most {
                thread::yield_now();
            }
            assert_eq!((kept_bytes(), reserve.borrowed_bytes()), (most, max_bytes));
            assert!(passing.iter().all(|passing| !passing.is_finished()));
            // The last audit does not end well.
            for (tail, link) in tails.iter().zip(&links).take(2) {
                tail.go_on(link).unwrap();
            }
            tails[2].end();
            let ends: Vec<_> = passing.into_iter().map(|one| one.join().unwrap()).collect();
            assert_eq!(ends, [Ok(()), Ok(()), Err(Stopped)]);
            links.iter().for_each(Link::close);
            let read: Vec<_> = read.into_iter().map(|read| read.join().unwrap()).collect();
            assert_eq!(read, [EACH << 20, EACH << 20, 0]);
        });
        drop(tails);
        assert_eq!(reserve.borrowed_bytes(), 0);
    }

    #[test]
    fn nothing_is_sent_after_an_audit_that_did_not_succeed() {
        let tail = Tail::new(&Reserve::new(1 << 20));
        let (link, there) = link();
        tail.placed(&link, vec![1]).unwrap();
        tail.pass(&link, &PIECE).unwrap();
        tail.end();
        assert_eq!(tail.pass(&link, &PIECE), Err(Stopped));
        link.close();
        assert_eq!(tail_bytes(&there), 0);
    }
}
