//! How others watch a migration, and cancel it.

use std::time::Duration;

use api::Progress;
use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

/// A handle shared by the migration and whoever watches it.
pub struct Watch {
    state: Mutex<State>,
    changed: Condvar,
    cancel: Sender<()>,
    cancelled: Receiver<()>,
}

struct State {
    progress: Progress,
    version: u64,
}

impl Watch {
    /// A watch that shows `progress` until the migration says more.
    #[must_use]
    pub fn new(progress: Progress) -> Self {
        let (cancel, cancelled) = bounded(1);
        Self {
            state: Mutex::new(State { progress, version: 0 }),
            changed: Condvar::new(),
            cancel,
            cancelled,
        }
    }

    /// Asks the migration to end and leave the VM at its source. After the
    /// point of no return this changes nothing.
    pub fn cancel(&self) {
        // A second cancel finds the first still there: nothing to add.
        let _ = self.cancel.try_send(());
    }

    /// The state now, and its version for [`Watch::wait`].
    #[must_use]
    pub fn progress(&self) -> (u64, Progress) {
        let state = self.state.lock();
        (state.version, state.progress.clone())
    }

    /// Blocks until there is a state newer than `version`, or `timeout` passed.
    #[must_use]
    pub fn wait(&self, version: u64, timeout: Duration) -> (u64, Progress) {
        let mut state = self.state.lock();
        if state.version <= version {
            self.changed.wait_while_for(&mut state, |state| state.version <= version, timeout);
        }
        (state.version, state.progress.clone())
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let mut state = self.state.lock();
        change(&mut state.progress);
        state.version += 1;
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn cancelled(&self) -> &Receiver<()> {
        &self.cancelled
    }
}
