//! One thread waits for what another one finds out, until a deadline.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The place where it is put.
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
    /// It is found out.
    pub(crate) fn tell(&self, outcome: T) {
        *self.outcome.lock() = Some(outcome);
        self.told.notify_one();
    }

    /// Waits for it; none if it isn't found out by then.
    pub(crate) fn wait(&self, until: Instant) -> Option<T> {
        let mut outcome = self.outcome.lock();
        while outcome.is_none() && !self.told.wait_until(&mut outcome, until).timed_out() {}
        outcome.take()
    }
}
