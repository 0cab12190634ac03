//! Watching a migration, and cancelling it, from other threads.

use std::time::Duration;

use api::{Bounds, BoundsChange, Phase, Progress};
use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

/// A handle shared by the migration and those that watch it.
pub struct Watch {
    state: Mutex<State>,
    changed: Condvar,
    cancel: Sender<()>,
    cancelled: Receiver<()>,
    rebind: Sender<()>,
    rebound: Receiver<()>,
    entered: Option<Box<Entered>>,
    /// Phases are told in their order, whichever threads come to them.
    telling: Mutex<()>,
}

type Entered = dyn Fn(Phase) + Send + Sync;

struct State {
    progress: Progress,
    version: u64,
    bounds: Bounds,
}

impl Watch {
    /// A watch that shows `progress` until the migration says more, of one that
    /// may use what `bounds` say.
    #[must_use]
    pub fn new(progress: Progress, bounds: Bounds) -> Self {
        let (cancel, cancelled) = bounded(1);
        let (rebind, rebound) = bounded(1);
        Self {
            state: Mutex::new(State { progress, version: 0, bounds }),
            changed: Condvar::new(),
            cancel,
            cancelled,
            rebind,
            rebound,
            entered: None,
            telling: Mutex::new(()),
        }
    }

    /// The same; `entered` is told of each phase that it comes to. A watcher may miss one
    /// that is over at once. It must not wait for anything: the VM may stand still.
    #[must_use]
    pub fn with_entered(self, entered: impl Fn(Phase) + Send + Sync + 'static) -> Self {
        Self { entered: Some(Box::new(entered)), ..self }
    }

    /// Changes what the migration may use, at both ends. Says what it may use
    /// from now on.
    pub fn set(&self, change: BoundsChange) -> Bounds {
        let bounds = {
            let mut state = self.state.lock();
            state.bounds = change.apply(std::mem::take(&mut state.bounds));
            state.bounds.clone()
        };
        // A change that is not heard yet is heard together with this one.
        let _ = self.rebind.try_send(());
        bounds
    }

    /// What the migration may use.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        self.state.lock().bounds.clone()
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
        let _in_order = self.telling.lock();
        let mut state = self.state.lock();
        let before = state.progress.phase;
        change(&mut state.progress);
        let phase = state.progress.phase;
        state.version += 1;
        drop(state);
        self.changed.notify_all();
        if let Some(entered) = self.entered.as_ref().filter(|_| phase != before) {
            entered(phase);
        }
    }

    /// Told when [`Watch::bounds`] have changed.
    pub(crate) fn rebound(&self) -> &Receiver<()> {
        &self.rebound
    }

    pub(crate) fn cancelled(&self) -> &Receiver<()> {
        &self.cancelled
    }
}
