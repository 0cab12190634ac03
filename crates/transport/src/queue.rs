//! The queue that all lanes pull from.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use page::Batch;
use parking_lot::{Condvar, Mutex};

use crate::error::LanesError;
use crate::meter::Delivered;

/// How long there may be no lane at all before the migration fails: two
/// rounds of noticing a dead path.
const ALL_DEAD_MAX: Duration = Duration::from_secs(16);

#[derive(Debug)]
struct State {
    waiting: VecDeque<Batch>,
    /// Batches that a lane has taken and that are not acknowledged.
    under_way: usize,
    /// No more will be submitted; lanes end when all is delivered.
    closed: bool,
    failed: Option<LanesError>,
    alive: usize,
    none_alive_since: Instant,
    delivered: Delivered,
    busy_since: Option<Instant>,
}

impl State {
    fn is_drained(&self) -> bool {
        self.under_way == 0 && self.waiting.is_empty()
    }

    fn is_over(&self) -> bool {
        self.closed && self.is_drained()
    }
}

/// Batches on their way, shared by the tap's threads and the lanes'.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// For lanes: a batch, the end, or a broken connection. Only who takes
    /// batches waits here: a new batch wakes one of them.
    work: Condvar,
    /// For lanes that can't connect: the end.
    over: Condvar,
    /// For the barrier: everything placed, or failed.
    drained: Condvar,
}

/// What a lane that asked for work gets.
pub(crate) enum Work {
    Send(Batch),
    /// The connection was found broken meanwhile.
    Broken,
    /// Nothing will come any more.
    End,
}

impl Queue {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                under_way: 0,
                closed: false,
                failed: None,
                alive: 0,
                none_alive_since: Instant::now(),
                delivered: Delivered::default(),
                busy_since: None,
            }),
            work: Condvar::new(),
            over: Condvar::new(),
            drained: Condvar::new(),
        }
    }

    pub(crate) fn submit(&self, batch: Batch) -> Result<(), LanesError> {
        let mut state = self.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.closed {
            return Err(LanesError::Stopped);
        }
        state.busy_since.get_or_insert_with(Instant::now);
        state.delivered.backlog_bytes += body_bytes(&batch);
        state.waiting.push_back(batch);
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// The next batch for a lane, or why there is none. Blocks.
    pub(crate) fn take(&self, broken: impl Fn() -> bool) -> Work {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() || state.is_over() {
                return Work::End;
            }
            if broken() {
                // It may have been woken for a batch: another takes it.
                self.work.notify_one();
                return Work::Broken;
            }
            if let Some(batch) = state.waiting.pop_front() {
                state.under_way += 1;
                return Work::Send(batch);
            }
            self.work.wait(&mut state);
        }
    }

    /// A batch is placed. Its buffer goes back to the pool here.
    pub(crate) fn placed(&self, batch: Batch) {
        let bodies = body_bytes(&batch);
        let guest_bytes = batch.guest_bytes();
        drop(batch);
        let mut state = self.state.lock();
        state.delivered.body_bytes += bodies;
        state.delivered.fill_bytes += guest_bytes - bodies;
        state.delivered.backlog_bytes -= bodies;
        state.under_way -= 1;
        if state.is_drained() {
            if let Some(since) = state.busy_since.take() {
                state.delivered.busy += since.elapsed();
            }
            drop(state);
            self.drained.notify_all();
            self.wake_for_end();
        }
    }

    /// A lane died with these batches not acknowledged: others carry them, and
    /// before anything else, since they are the oldest.
    pub(crate) fn hand_back(&self, batches: impl DoubleEndedIterator<Item = Batch>) {
        let mut state = self.state.lock();
        for batch in batches.rev() {
            state.under_way -= 1;
            state.waiting.push_front(batch);
        }
        drop(state);
        self.work.notify_all();
    }

    /// Wakes all lanes, so that one sees that its connection broke.
    pub(crate) fn wake_lanes(&self) {
        let _state = self.state.lock();
        self.work.notify_all();
    }

    pub(crate) fn lane_up(&self) {
        self.state.lock().alive += 1;
    }

    pub(crate) fn lane_down(&self) {
        let mut state = self.state.lock();
        state.alive -= 1;
        if state.alive == 0 {
            state.none_alive_since = Instant::now();
        }
    }

    /// A lane could not connect. Fails everything if that is so for all lanes
    /// and for too long; returns whether to go on trying, after `pause`.
    pub(crate) fn could_not_connect(&self, why: &str, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if state.alive == 0 && state.none_alive_since.elapsed() > ALL_DEAD_MAX {
            let seconds = ALL_DEAD_MAX.as_secs();
            self.fail_locked(&mut state, LanesError::AllDead { seconds, last: why.to_owned() });
        }
        let until = Instant::now() + pause;
        loop {
            if state.failed.is_some() || state.is_over() {
                return false;
            }
            if self.over.wait_until(&mut state, until).timed_out() {
                return true;
            }
        }
    }

    /// Blocks until all that was submitted is placed.
    pub(crate) fn wait_drained(&self) -> Result<(), LanesError> {
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.is_drained() {
                return Ok(());
            }
            self.drained.wait(&mut state);
        }
    }

    /// No more batches; lanes end once all is delivered.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake_for_end();
    }

    /// Ends everything now; batches that wait are dropped.
    pub(crate) fn fail(&self, error: LanesError) {
        self.fail_locked(&mut self.state.lock(), error);
    }

    fn fail_locked(&self, state: &mut State, error: LanesError) {
        state.failed.get_or_insert(error);
        state.waiting.clear();
        self.wake_for_end();
        self.drained.notify_all();
    }

    fn wake_for_end(&self) {
        self.work.notify_all();
        self.over.notify_all();
    }

    pub(crate) fn failure(&self) -> Option<LanesError> {
        self.state.lock().failed.clone()
    }

    pub(crate) fn delivered(&self) -> Delivered {
        let state = self.state.lock();
        let mut delivered = state.delivered;
        if let Some(since) = state.busy_since {
            delivered.busy += since.elapsed();
        }
        delivered
    }
}

fn body_bytes(batch: &Batch) -> u64 {
    batch.bodies().len() as u64 * page::PAGE_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Lanes that can't connect wait beside those that carry, and have no use
    /// for a batch: woken for one, they would leave it lying for ever.
    #[test]
    fn a_batch_wakes_a_lane_that_takes_it() {
        const DEAD: usize = 8;
        let pool = page::Pool::new(1 << 20);
        let queue = Queue::new();
        queue.lane_up();
        thread::scope(|scope| {
            for _ in 0..DEAD {
                scope.spawn(|| while queue.could_not_connect("x", Duration::from_secs(1)) {});
            }
            // Most of them wait by now; which ones does not matter.
            thread::sleep(Duration::from_millis(50));
            let carrier = scope.spawn(|| {
                let mut carried = 0;
                while let Work::Send(batch) = queue.take(|| false) {
                    carried += 1;
                    queue.placed(batch);
                }
                carried
            });
            for _ in 0..100 {
                queue.submit(pool.take().unwrap()).unwrap();
                queue.wait_drained().unwrap();
            }
            queue.close();
            assert_eq!(carrier.join().unwrap(), 100);
        });
    }
}
