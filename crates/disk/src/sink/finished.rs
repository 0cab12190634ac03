//! How many batches a sink has finished with: the source may send that many more.

use std::ops::Deref;
use std::sync::Arc;

use page::BlockBatch;
use parking_lot::{Condvar, Mutex};

/// A count that can be waited for.
#[derive(Debug, Default)]
pub(super) struct FinishedBatches {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    batches: u64,
    over: bool,
}

impl FinishedBatches {
    /// Blocks until the count is `at_least`, or the sink ends.
    pub(super) fn wait(&self, at_least: u64) -> Option<u64> {
        let mut state = self.state.lock();
        while state.batches < at_least && !state.over {
            self.changed.wait(&mut state);
        }
        (!state.over).then_some(state.batches)
    }

    pub(super) fn end(&self) {
        self.state.lock().over = true;
        self.changed.notify_all();
    }
}

/// A batch accepted for the first time. Dropping it frees its buffer and then
/// counts it, whether it was written or newer batches had covered it.
#[derive(Debug)]
pub(super) struct Counted {
    // Dropped first, in the order of the fields.
    batch: BlockBatch,
    _count: Count,
}

impl Counted {
    pub(super) fn new(batch: BlockBatch, finished: &Arc<FinishedBatches>) -> Self {
        Self { batch, _count: Count(Arc::clone(finished)) }
    }
}

impl Deref for Counted {
    type Target = BlockBatch;

    fn deref(&self) -> &BlockBatch {
        &self.batch
    }
}

#[derive(Debug)]
struct Count(Arc<FinishedBatches>);

impl Drop for Count {
    fn drop(&mut self) {
        self.0.state.lock().batches += 1;
        self.0.changed.notify_all();
    }
}
