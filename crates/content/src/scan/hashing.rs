//! Reads and names pages, on a thread that runs only when its CPU is idle.
//!
//! That thread takes no lock of the index. On a busy host it may stop anywhere for seconds, and a
//! migration's thread that needs the lock would wait as long.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use data_threads::Joined;
use page::{Buffer, PAGE_BYTES};
use parking_lot::Mutex;

use super::{Stop, TURN_PAGES, cpu_time, idle};
use crate::Name;
use crate::fingerprint::Fingerprint;
use crate::index::Seat;

/// Pages that are read together. They fit a core's cache, so they are hashed from it.
const READ_PAGES: usize = 32;

/// Pages of a member that are scanned together.
pub(super) struct Turn {
    pub(super) seat: Arc<Seat>,
    pub(super) first: u64,
    /// At most [`TURN_PAGES`].
    pub(super) pages: usize,
    /// What the turn before found. Its memory is used again.
    pub(super) found: Found,
}

/// What a turn finds.
#[derive(Default)]
pub(super) struct Found {
    pub(super) named: Vec<(u64, Name)>,
    /// One for each name, if the member's names are kept.
    pub(super) fingerprints: Vec<Fingerprint>,
    /// Pages that have no content worth a name, or can't be read.
    pub(super) nothing: Vec<u64>,
    /// How much CPU time the hashing thread has used since its start.
    pub(super) cpu: Duration,
}

/// Buffers for a turn.
#[derive(Default)]
pub(super) struct Hashing {
    bytes: Buffer,
    pages: Vec<u64>,
}

impl Hashing {
    /// Names the pages that are present.
    pub(super) fn look(&mut self, mut turn: Turn) -> Turn {
        let Turn { seat, first, pages, found } = &mut turn;
        found.named.clear();
        found.fingerprints.clear();
        found.nothing.clear();
        let mut present = [false; TURN_PAGES];
        let present = &mut present[..*pages];
        seat.holder.present(*first, present);
        self.pages.clear();
        for (page, present) in (*first..).zip(&*present) {
            let pages = if *present { &mut self.pages } else { &mut found.nothing };
            pages.push(page);
        }
        let bytes = self.bytes.room(READ_PAGES * PAGE_BYTES);
        let mut rest = &self.pages[..];
        while !rest.is_empty() {
            let now = &rest[..rest.len().min(READ_PAGES)];
            let into = &mut bytes[..now.len() * PAGE_BYTES];
            let read = seat.holder.read_many(now, into).min(now.len());
            for (page, bytes) in now[..read].iter().zip(into.chunks_exact(PAGE_BYTES)) {
                if page::is_zero(bytes) {
                    found.nothing.push(*page);
                } else {
                    found.named.push((*page, seat.key.name(bytes)));
                    // Of the same copy: the guest may have written since it was made.
                    found.fingerprints.extend(seat.earlier_names.fingerprint(bytes));
                }
            }
            rest = &rest[read..];
            if read < now.len() {
                // The next page can't be read; those after it may be readable.
                found.nothing.push(rest[0]);
                rest = &rest[1..];
            }
        }
        // The next turn may come after this VM has left. The buffer stays: a thread that may
        // stop anywhere for seconds should not have the kernel change mappings.
        bytes.fill(0);
        turn
    }
}

/// The thread. It ends when this is dropped.
pub(super) struct Hasher {
    turns: Sender<Turn>,
    looked: Receiver<Turn>,
    _thread: Joined,
}

impl Hasher {
    /// Starts it. If the system refuses to run it only on an idle CPU, `refused` says so.
    pub(super) fn start(refused: Arc<Mutex<Option<String>>>) -> io::Result<Self> {
        let (turns, begun) = channel::<Turn>();
        let (look, looked) = channel();
        let thread = thread::Builder::new().name("scan-hash".to_owned()).spawn(move || {
            *refused.lock() = idle::only_when_idle().err().map(|error| {
                format!(
                    "the system refuses to run the scanner only when a CPU is idle ({error}): it \
                     has a nice value of 19, or the agent's"
                )
            });
            let mut hashing = Hashing::default();
            for turn in begun {
                let mut turn = hashing.look(turn);
                turn.found.cpu = cpu_time();
                if look.send(turn).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { turns, looked, _thread: thread.into() })
    }

    /// Has a turn looked at, and waits until it is. Fails if the thread has ended, after a fault.
    pub(super) fn look(&self, turn: Turn) -> Result<Turn, Stop> {
        self.turns.send(turn).map_err(|_| Stop)?;
        self.looked.recv().map_err(|_| Stop)
    }
}
