//! One thread waits for another one's result, until a deadline.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The place of the result.
#[derive(Debug)]
pub(crate) struct Waiter<T> {
    outcome: Mutex<Option<T>>,
    told: Condvar,
}

impl<T> Default for Waiter<T> {
    fn default() -> Self {
        Self { outcome: Mutex::new(None), told: Condvar::new() }
    }
}

impl<T> Waiter<T> {
    /// Sets the result, and wakes the waiting thread.
    pub(crate) fn tell(&self, outcome: T) {
        *self.outcome.lock() = Some(outcome);
        self.told.notify_one();
    }

    /// Waits for the result. None if there is none by then.
    pub(crate) fn wait(&self, until: Instant) -> Option<T> {
        let mut outcome = self.outcome.lock();
        while outcome.is_none() && !self.told.wait_until(&mut outcome, until).timed_out() {}
        outcome.take()
    }
}
