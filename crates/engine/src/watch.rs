//! Lets other threads watch and cancel a migration.

use std::sync::Arc;
use std::time::Duration;

use api::{Bounds, BoundsChange, Phase, Progress};
use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

/// A handle shared by the migration and its watchers.
pub struct Watch {
    state: Mutex<State>,
    changed: Condvar,
    cancel: Sender<()>,
    cancelled: Receiver<()>,
    rebind: Sender<()>,
    rebound: Receiver<()>,
    lose: Sender<String>,
    lost: Receiver<String>,
    /// That of the migration, if this is another connection of it.
    main: Option<Arc<Watch>>,
    entered: Option<Box<Entered>>,
    /// Keeps phases in order for `entered`, whichever threads report them.
    telling: Mutex<()>,
}

type Entered = dyn Fn(Phase) + Send + Sync;

struct State {
    progress: Progress,
    version: u64,
    bounds: Bounds,
    is_broken_off: bool,
}

impl Watch {
    /// A watch that shows `progress` until the migration reports more; the migration may use what
    /// `bounds` permit.
    #[must_use]
    pub fn new(progress: Progress, bounds: Bounds) -> Self {
        let (cancel, cancelled) = bounded(1);
        let (rebind, rebound) = bounded(1);
        let (lose, lost) = bounded(1);
        Self {
            state: Mutex::new(State { progress, version: 0, bounds, is_broken_off: false }),
            changed: Condvar::new(),
            cancel,
            cancelled,
            rebind,
            rebound,
            lose,
            lost,
            main: None,
            entered: None,
            telling: Mutex::new(()),
        }
    }

    /// The same; `entered` is called with each phase that the migration enters, even one that is
    /// over at once, which a watcher may miss. It must not block: the VM may be stopped.
    #[must_use]
    pub fn with_entered(self, entered: impl Fn(Phase) + Send + Sync + 'static) -> Self {
        Self { entered: Some(Box::new(entered)), ..self }
    }

    /// The same for another connection of the migration that `main` watches, such as a multifd
    /// channel that is passed on by itself: `main` is notified if it fails.
    #[must_use]
    pub fn next_to(self, main: Option<Arc<Self>>) -> Self {
        Self { main, ..self }
    }

    /// The watch of the migration that this is another connection of.
    #[must_use]
    pub fn main(&self) -> Option<&Arc<Self>> {
        self.main.as_ref()
    }

    /// Makes the migration end for this reason, and leave the VM at its source. After the point of
    /// no return this changes nothing.
    pub fn end(&self, why: &str) {
        // Only the first reason matters.
        let _ = self.lose.try_send(why.to_owned());
    }

    /// Tells the migration that this connection of it has failed.
    pub(crate) fn fails(&self, why: &str) {
        if let Some(main) = &self.main {
            main.end(why);
        }
    }

    /// Receives why it has to end: another of its connections has failed, or its host lacks
    /// something.
    pub(crate) fn lost(&self) -> &Receiver<String> {
        &self.lost
    }

    /// Changes the migration's bounds at both ends; returns the new ones.
    pub fn set(&self, change: BoundsChange) -> Bounds {
        let bounds = {
            let mut state = self.state.lock();
            state.bounds = change.apply(std::mem::take(&mut state.bounds));
            state.bounds.clone()
        };
        // A pending change is handled together with this one.
        let _ = self.rebind.try_send(());
        bounds
    }

    /// The migration's bounds.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        self.state.lock().bounds.clone()
    }

    /// Asks the migration to end and leave the VM at its source. After the
    /// point of no return this changes nothing.
    pub fn cancel(&self) {
        // A second cancel finds the first one pending: nothing to add.
        let _ = self.cancel.try_send(());
    }

    /// Asks a carried migration to end even after its point of no return: the agent ends.
    pub fn break_off(&self) {
        self.state.lock().is_broken_off = true;
        self.cancel();
    }

    pub(crate) fn is_broken_off(&self) -> bool {
        self.state.lock().is_broken_off
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

    /// Receives when [`Watch::bounds`] have changed.
    pub(crate) fn rebound(&self) -> &Receiver<()> {
        &self.rebound
    }

    pub(crate) fn cancelled(&self) -> &Receiver<()> {
        &self.cancelled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Watch {
        Watch::new(Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0), Bounds::default())
    }

    #[test]
    fn a_migration_hears_of_the_first_of_its_connections_that_fails() {
        let main = Arc::new(watch());
        let others = [(); 2].map(|()| watch().next_to(Some(Arc::clone(&main))));
        assert!(others.iter().all(|one| one.main().is_some_and(|it| Arc::ptr_eq(it, &main))));
        others[1].fails("a lane failed");
        others[0].fails("cancelled");
        main.fails("it has no main connection besides itself");
        assert_eq!(main.lost().try_iter().collect::<Vec<_>>(), ["a lane failed"]);
        assert!(others.iter().all(|one| one.lost().is_empty()));
    }
}
