//! How a stage, which stands between the queue and the lanes, accounts for batches that
//! lanes no longer have or never had.

use std::time::Instant;

use super::{LITTLE, Queue};
use crate::load::Load;

/// A set of changes applied at once; the default changes nothing.
#[derive(Debug)]
pub struct Change<X> {
    /// Batches of pages that are in flight from now on, though no lane has them.
    pub entered: usize,
    /// Batches of pages that are no longer in flight.
    pub left: usize,
    /// Batches that were kept for an answer and are answered.
    pub answered: usize,
    /// Bytes of pages delivered as bytes.
    pub body_bytes: u64,
    /// Bytes of pages delivered without being sent.
    pub found_bytes: u64,
    /// Bytes of delivered fills.
    pub fill_bytes: u64,
    /// Bytes of submitted pages that another batch in flight covers.
    pub covered_bytes: u64,
    /// Bytes that the destination awaits from other providers, if that has changed.
    pub awaited_bytes: Option<u64>,
    /// Loads to send before everything that waits. They count as in flight.
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
    /// Applies a change. The queue is not drained before every entered batch has left.
    pub fn count(&self, change: Change<X>) {
        self.change(change, false);
    }

    /// As [`Queue::count`], and wakes waiting lanes to check for work.
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
        delivered.batches += u64::from(body_bytes > 0);
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

    /// Notes that a batch is kept until it is answered. While there are many of those, no
    /// waiting batch is taken.
    pub fn adds_query(&self) {
        self.state.lock().asked += 1;
    }

    /// The number of pages that lanes have to send, where `pages` counts a stage's load;
    /// none if that is more than a little.
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

    /// Whether any load that waits for a lane is such a one.
    pub fn has(&self, is_it: impl Fn(&Load<X>) -> bool) -> bool {
        let state = self.state.lock();
        // The oldest first.
        state.again.iter().chain(&state.first).chain(&state.waiting).any(is_it)
    }

    /// Reserves a batch that will be sent first: it counts as submitted, so nothing is
    /// drained before it is delivered.
    ///
    /// Blocks until `may` permits it, given the bytes that the destination awaits from
    /// other providers and the number of such batches that wait. None if no more batches
    /// are accepted, or once it is `over`.
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

    /// Makes threads that wait to reserve check again.
    pub fn wake_reserving(&self) {
        let _state = self.state.lock();
        self.has_room.notify_all();
    }

    /// Queues the reserved batch, with `bytes` of pages.
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

    /// Releases a reservation unused.
    pub fn give_up(&self) {
        let mut state = self.state.lock();
        state.leaves();
        self.has_less(state);
    }
}
