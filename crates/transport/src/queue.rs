//! The queue that all lanes pull from.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::LanesError;
use crate::load::{Amount, Load};
use crate::meter::Delivered;

/// How long there may be no lane at all before the migration fails: two
/// rounds of noticing a dead path.
const ALL_DEAD_MAX: Duration = Duration::from_secs(16);

#[derive(Debug)]
struct State {
    waiting: VecDeque<Load>,
    /// Batches submitted and not acknowledged, and how many of them are pages.
    out: usize,
    pages_out: usize,
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
        self.out == 0
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
    Send(Load),
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
                out: 0,
                pages_out: 0,
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

    pub(crate) fn submit(&self, load: Load) -> Result<(), LanesError> {
        let mut state = self.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.closed {
            return Err(LanesError::Stopped);
        }
        state.out += 1;
        match load.amount() {
            Amount::Pages { body_bytes, .. } => {
                state.pages_out += 1;
                state.busy_since.get_or_insert_with(Instant::now);
                state.delivered.backlog_bytes += body_bytes;
            }
            Amount::Blocks { data_bytes, .. } => {
                state.delivered.block_backlog_bytes += data_bytes;
            }
        }
        state.waiting.push_back(load);
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
            if let Some(load) = state.waiting.pop_front() {
                return Work::Send(load);
            }
            self.work.wait(&mut state);
        }
    }

    /// A batch is placed, or taken over. Its buffer goes back to the pool here.
    pub(crate) fn placed(&self, load: Load) {
        let amount = load.amount();
        load.acknowledged();
        let mut state = self.state.lock();
        state.out -= 1;
        match amount {
            Amount::Pages { body_bytes, fill_bytes } => {
                state.pages_out -= 1;
                state.delivered.body_bytes += body_bytes;
                state.delivered.fill_bytes += fill_bytes;
                state.delivered.backlog_bytes -= body_bytes;
            }
            Amount::Blocks { data_bytes, zero_bytes } => {
                state.delivered.block_bytes += data_bytes;
                state.delivered.block_zero_bytes += zero_bytes;
                state.delivered.block_backlog_bytes -= data_bytes;
            }
        }
        if state.pages_out == 0
            && let Some(since) = state.busy_since.take()
        {
            state.delivered.busy += since.elapsed();
        }
        if state.is_drained() {
            drop(state);
            self.drained.notify_all();
            self.wake_for_end();
        }
    }

    /// Pages of a batch that a lane has taken are not sent after all.
    pub(crate) fn dropped(&self, pages: usize) {
        if pages > 0 {
            let bytes = pages as u64 * page::PAGE_BYTES as u64;
            let mut state = self.state.lock();
            state.delivered.backlog_bytes -= bytes;
            state.delivered.dropped_bytes += bytes;
        }
    }

    /// A lane died with these batches not acknowledged: others carry them, and
    /// before anything else, since they are the oldest. After a failure nobody
    /// does, and they are dropped: what waits for them learns it now.
    pub(crate) fn hand_back(&self, loads: impl DoubleEndedIterator<Item = Load>) {
        let mut state = self.state.lock();
        if state.failed.is_some() {
            drop(state);
            drop(loads.collect::<Vec<_>>());
            return;
        }
        for load in loads.rev() {
            state.waiting.push_front(load);
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
            drop(state);
            let seconds = ALL_DEAD_MAX.as_secs();
            self.fail(LanesError::AllDead { seconds, last: why.to_owned() });
            return false;
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
        let mut state = self.state.lock();
        state.failed.get_or_insert(error);
        let lost = std::mem::take(&mut state.waiting);
        drop(state);
        self.wake_for_end();
        self.drained.notify_all();
        // Whoever issued them is told: not under the queue's lock.
        drop(lost);
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
                while let Work::Send(load) = queue.take(|| false) {
                    carried += 1;
                    queue.placed(load);
                }
                carried
            });
            for _ in 0..100 {
                queue.submit(pool.take().unwrap().into()).unwrap();
                queue.wait_drained().unwrap();
            }
            queue.close();
            assert_eq!(carrier.join().unwrap(), 100);
        });
    }

    #[test]
    fn blocks_count_apart_from_pages_and_only_pages_make_lanes_busy() {
        let pool = page::Pool::new(4 * page::SLOT_BYTES);
        let queue = Queue::new();
        let mut blocks = pool.take_blocks().unwrap();
        blocks.push_data(1024);
        blocks.push_zero(4096);
        queue.submit(blocks.into()).unwrap();
        assert!(queue.state.lock().busy_since.is_none());
        let mut pages = pool.take().unwrap();
        pages.push_body(page::PageIndex(3), 0);
        queue.submit(pages.into()).unwrap();
        let counted = queue.delivered();
        assert_eq!((counted.backlog_bytes, counted.block_backlog_bytes), (4096, 1024));
        for _ in 0..2 {
            let Work::Send(load) = queue.take(|| false) else { panic!("two are there") };
            queue.placed(load);
        }
        let counted = queue.delivered();
        assert_eq!((counted.body_bytes, counted.backlog_bytes), (4096, 0));
        assert_eq!((counted.block_bytes, counted.block_zero_bytes), (1024, 4096));
        assert_eq!(counted.block_backlog_bytes, 0);
        queue.wait_drained().unwrap();
    }

    #[test]
    fn what_is_handed_back_after_a_failure_is_dropped() {
        let pool = page::Pool::new(4 * page::SLOT_BYTES);
        let queue = Queue::new();
        queue.submit(pool.take().unwrap().into()).unwrap();
        let Work::Send(load) = queue.take(|| false) else { panic!("one is there") };
        queue.fail(LanesError::Stopped);
        queue.hand_back(std::iter::once(load));
        assert_eq!(pool.out_bytes(), 0);
    }
}
