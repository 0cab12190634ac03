//! What a stage does to what is out: it stands between the queue and the lanes, and
//! knows of batches that lanes don't have any more, or never had.

use std::time::Instant;

use super::{LITTLE, Queue};
use crate::load::Load;

/// What changes at once. All of it is none by default.
#[derive(Debug)]
pub struct Change<X> {
    /// Batches of pages that are out from now on, though no lane has them.
    pub entered: usize,
    /// Batches of pages that are not any more.
    pub left: usize,
    /// Batches that were kept, and are answered.
    pub answered: usize,
    /// Pages that are delivered as bytes.
    pub body_bytes: u64,
    /// Pages that are delivered without.
    pub found_bytes: u64,
    /// Fills that are delivered.
    pub fill_bytes: u64,
    /// Pages that were submitted, and that something else is out for.
    pub covered_bytes: u64,
    /// What the destination has from elsewhere later, if that has changed.
    pub awaited_bytes: Option<u64>,
    /// What is sent before all that waits. It is out, too.
    pub again: [Option<X>; 2],
}

impl<X> Default for Change<X> {
    fn default() -> Self {
        Self {
            entered: 0,
            left: 0,
            answered: 0,
            body_bytes: 0,
            found_bytes: 0,
            fill_bytes: 0,
            covered_bytes: 0,
            awaited_bytes: None,
            again: [None, None],
        }
    }
}

impl<X> Queue<X> {
    /// What is out has changed. What is entered is not drained before it has left.
    pub fn count(&self, change: Change<X>) {
        self.change(change, false);
    }

    /// As [`Queue::count`], and all lanes that wait look what to do.
    pub fn settle(&self, change: Change<X>) {
        self.change(change, true);
    }

    fn change(&self, change: Change<X>, settles: bool) {
        let Change { entered, left, answered, body_bytes, found_bytes, fill_bytes, .. } = change;
        let mut state = self.state.lock();
        state.out += entered;
        state.pages_out += entered;
        for again in change.again.into_iter().flatten() {
            state.enters();
            state.again.push_back(Load::Other(again));
        }
        state.out -= left;
        state.pages_out -= left;
        state.asked -= answered;
        let delivered = &mut state.delivered;
        delivered.body_bytes += body_bytes;
        delivered.found_bytes += found_bytes;
        delivered.fill_bytes += fill_bytes;
        delivered.backlog_bytes -= body_bytes + found_bytes + change.covered_bytes;
        delivered.awaited_bytes = change.awaited_bytes.unwrap_or(delivered.awaited_bytes);
        if settles {
            state.settled += 1;
            self.work.notify_all();
        }
        self.has_less(state);
    }

    /// A batch is kept until it is answered. While there are many of them, no more of
    /// what waits is taken.
    pub fn asks(&self) {
        self.state.lock().asked += 1;
    }

    /// How many pages lanes have to send, by what a stage says of its own; none if those
    /// are more than a little.
    pub fn queued(&self, pages: impl Fn(&X) -> u64) -> Option<u64> {
        let state = self.state.lock();
        if state.waiting.len() > LITTLE {
            return None;
        }
        let again = state.again.iter().map(|load| match load {
            Load::Other(other) => pages(other),
            Load::Pages(_) | Load::Blocks(_) => page::BATCH_PAGES as u64,
        });
        Some(again.sum::<u64>() + (state.waiting.len() * page::BATCH_PAGES) as u64)
    }

    /// A batch that will be sent first counts as submitted: nothing is drained before it
    /// is delivered. Blocks until it `may` be, by what the destination awaits from
    /// elsewhere, in bytes, and how many such batches wait. None if there will be no more
    /// batches, or once it is `over`.
    pub fn reserve(&self, over: impl Fn() -> bool, may: impl Fn(u64, usize) -> bool) -> Option<()> {
        let mut state = self.state.lock();
        loop {
            if over() || state.failed.is_some() || state.closed {
                return None;
            }
            if may(state.delivered.awaited_bytes, state.first.len()) {
                state.enters();
                state.busy_since.get_or_insert_with(Instant::now);
                return Some(());
            }
            self.has_room.wait(&mut state);
        }
    }

    /// Who waits to reserve looks again.
    pub fn wake_reserving(&self) {
        let _state = self.state.lock();
        self.has_room.notify_all();
    }

    /// Queues what was reserved: pages of so many bytes.
    pub fn submit_first(&self, reserved: X, bytes: u64) {
        let mut state = self.state.lock();
        if state.failed.is_some() {
            state.leaves();
            self.has_less(state);
            return;
        }
        state.delivered.backlog_bytes += bytes;
        state.first.push_back(Load::Other(reserved));
        drop(state);
        self.work.notify_one();
    }

    /// What was reserved is not used.
    pub fn give_up(&self) {
        let mut state = self.state.lock();
        state.leaves();
        self.has_less(state);
    }
}
