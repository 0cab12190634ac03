//! What one connection has sent and not yet heard of.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use parking_lot::Mutex;

use crate::load::Load;
use crate::queue::Queue;

/// The batches of one connection between write and acknowledgement.
///
/// An acknowledgement can overtake the sender, which notes a batch only once
/// the write returned: hence both counts, and whoever comes second releases.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    state: Mutex<State>,
    broken: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    sent: VecDeque<Load>,
    released: u64,
    acknowledged: u64,
}

impl Flight {
    /// A batch is written. Returns how many are released by it.
    pub(crate) fn sent(&self, load: Load, queue: &Queue) -> u64 {
        let mut state = self.state.lock();
        state.sent.push_back(load);
        release(&mut state, queue)
    }

    /// The destination has placed `placed` batches of this connection.
    /// Returns how many are released by it, or nothing if it counts backwards.
    pub(crate) fn acknowledged(&self, placed: u64, queue: &Queue) -> Option<u64> {
        let mut state = self.state.lock();
        if placed < state.acknowledged {
            return None;
        }
        state.acknowledged = placed;
        Some(release(&mut state, queue))
    }

    /// The connection is of no use any more.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, SeqCst);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(SeqCst)
    }

    /// Gives what was not acknowledged back to the queue.
    pub(crate) fn hand_back(&self, queue: &Queue) {
        let sent = std::mem::take(&mut self.state.lock().sent);
        queue.hand_back(sent.into_iter());
    }
}

fn release(state: &mut State, queue: &Queue) -> u64 {
    let mut count = 0;
    while state.released < state.acknowledged {
        let Some(load) = state.sent.pop_front() else { break };
        state.released += 1;
        count += 1;
        queue.placed(load);
    }
    count
}
