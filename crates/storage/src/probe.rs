//! Probes storage that may not answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::OpenError;
use crate::reader::{abandon, came_back, check_abandoned};

/// A probe of storage, on a thread of its own that is left behind if the storage doesn't answer.
/// Several that are started together take no longer than the slowest.
#[derive(Debug)]
pub struct Probe<T> {
    slot: Arc<Slot<T>>,
    due: Instant,
}

impl<T: Send + 'static> Probe<T> {
    /// Starts it. It may take as long as `patience`, from now on.
    ///
    /// # Errors
    /// If a thread can't be started, or too many that were left behind still hang.
    pub fn start(
        patience: Duration,
        probe: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Self, OpenError> {
        check_abandoned()?;
        let (slot, due) = (Arc::new(Slot::new()), Instant::now() + patience);
        let filled = Arc::clone(&slot);
        let spawned = data_threads::spawn("storage-open", move || filled.put(probe()));
        spawned.map_err(OpenError::Local)?;
        Ok(Self { slot, due })
    }

    /// Waits for the result. None if the storage didn't answer in time.
    #[must_use]
    pub fn wait(self) -> Option<T> {
        self.slot.take(self.due)
    }
}

/// Receives the result, if the caller still waits for it.
#[derive(Debug)]
struct Slot<T> {
    state: Mutex<Waiting<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Waiting<T> {
    result: Option<T>,
    left: bool,
}

impl<T> Slot<T> {
    fn new() -> Self {
        let waiting = Waiting { result: None, left: false };
        Self { state: Mutex::new(waiting), changed: Condvar::new() }
    }

    fn put(&self, result: T) {
        let mut state = self.state.lock();
        if state.left {
            came_back();
            return;
        }
        state.result = Some(result);
        drop(state);
        self.changed.notify_one();
    }

    fn take(&self, due: Instant) -> Option<T> {
        let mut state = self.state.lock();
        while state.result.is_none() && Instant::now() < due {
            let _ = self.changed.wait_until(&mut state, due);
        }
        let result = state.result.take();
        if result.is_none() {
            state.left = true;
            abandon();
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::abandoned_threads;

    const LONG: Duration = Duration::from_secs(600);

    /// With one after the other, as many would wait as there are images on storage that hangs.
    #[test]
    fn none_waits_for_another_to_end() {
        let (go, gone) = channel();
        let first = Probe::start(LONG, move || gone.recv().is_ok()).unwrap();
        let second = Probe::start(LONG, move || go.send(()).is_ok()).unwrap();
        assert_eq!((first.wait(), second.wait()), (Some(true), Some(true)));
    }

    #[test]
    fn one_without_an_answer_is_left_behind() {
        let (_answer, silent) = channel::<()>();
        let probe = Probe::start(Duration::from_millis(10), move || silent.recv().is_ok()).unwrap();
        assert_eq!(probe.wait(), None);
        assert!(abandoned_threads() > 0);
    }
}
