//! The queue that all lanes pull from.

mod settle;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::LanesError;
use crate::load::{Amount, Load};
use crate::meter::Delivered;
use crate::outage::Pause;

pub use settle::Change;

/// Waiting batches up to this number count as few.
const LITTLE: usize = 4;
/// Most batches kept until their query is answered: 8 MiB of pages. Batches that are
/// queried long before they could be sent hold up others.
pub(crate) const ASKED_MAX: usize = 16;

/// How long all lanes may be down before the migration fails: twice the time that it
/// takes to detect a dead path.
const ALL_DEAD_MAX: Duration = Duration::from_secs(16);

#[derive(Debug)]
struct State<X> {
    /// Batches of dead lanes, and loads that a stage sends after all: sent first,
    /// because they are the oldest.
    again: VecDeque<Load<X>>,
    /// Blocks that the destination has no room for yet; older than those in
    /// `waiting`.
    held: VecDeque<Load<X>>,
    /// Loads that a stage sends on its own: a few bytes per page.
    first: VecDeque<Load<X>>,
    waiting: VecDeque<Load<X>>,
    /// Batches of blocks that the destination has room for, counted from the first
    /// ever sent; none if it has not reported room.
    block_room: Option<u64>,
    /// Batches of blocks that lanes have taken. One that is sent again counts once,
    /// because the destination keeps only one of the copies.
    blocks_taken: u64,
    /// Batches submitted and not acknowledged: all of them, and those of pages.
    out: usize,
    pages_out: usize,
    /// No more will be submitted; lanes end when everything is delivered.
    closed: bool,
    failed: Option<LanesError>,
    alive: usize,
    none_alive_since: Instant,
    delivered: Delivered,
    busy_since: Option<Instant>,
    /// Batches kept until their query is answered.
    asked: usize,
    /// How often a stage has reported an outcome that lanes must check.
    settled: u64,
}

impl<X> State<X> {
    /// Counts a batch of pages as in flight.
    fn enters(&mut self) {
        self.out += 1;
        self.pages_out += 1;
    }

    /// Counts a batch of pages as no longer in flight.
    fn leaves(&mut self) {
        self.out -= 1;
        self.pages_out -= 1;
    }

    fn is_drained(&self) -> bool {
        self.out == 0
    }

    fn is_over(&self) -> bool {
        self.closed && self.is_drained()
    }

    /// The next batch that may be sent. Blocks without room are passed over, so that
    /// pages behind them don't wait for the destination's disks.
    fn next(&mut self) -> Option<Load<X>> {
        let first = self.again.pop_front().or_else(|| self.first.pop_front());
        if first.is_some() {
            return first;
        }
        let has_room = self.block_room.is_none_or(|room| self.blocks_taken < room);
        if has_room && let Some(load) = self.held.pop_front() {
            self.blocks_taken += 1;
            return Some(load);
        }
        if self.asked >= ASKED_MAX {
            return None;
        }
        while let Some(load) = self.waiting.pop_front() {
            match load {
                Load::Blocks(_) if has_room => {
                    self.blocks_taken += 1;
                    return Some(load);
                }
                Load::Blocks(_) => self.held.push_back(load),
                pages => return Some(pages),
            }
        }
        None
    }
}

/// Batches to be sent, shared by the tap's threads, the lanes, and a stage between
/// them, if there is one.
#[derive(Debug)]
pub struct Queue<X = Infallible> {
    state: Mutex<State<X>>,
    /// Wakes lanes: for a batch, the end, or a broken connection. Only threads that
    /// take batches wait here, because a new batch wakes just one of them.
    work: Condvar,
    /// Wakes lanes that can't connect: for the end, or because no lane has a connection any more.
    over: Condvar,
    /// Wakes the barrier: everything is placed, or the lanes failed.
    drained: Condvar,
    /// Wakes a thread that waits to reserve: less is in flight.
    has_room: Condvar,
}

/// What a lane gets from the queue.
#[derive(Debug)]
pub enum Work<X = Infallible> {
    /// A batch.
    Send(Load<X>),
    /// No batch yet, but a stage has reported an outcome.
    Settled,
    /// No further batch.
    Over(Sent),
}

/// How far sending over one connection got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The queue has ended.
    All,
    /// The connection was found broken.
    UntilBroken,
}

impl<X> Queue<X> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                again: VecDeque::new(),
                held: VecDeque::new(),
                first: VecDeque::new(),
                waiting: VecDeque::new(),
                block_room: None,
                blocks_taken: 0,
                out: 0,
                pages_out: 0,
                closed: false,
                failed: None,
                alive: 0,
                none_alive_since: Instant::now(),
                delivered: Delivered::default(),
                busy_since: None,
                asked: 0,
                settled: 0,
            }),
            work: Condvar::new(),
            over: Condvar::new(),
            drained: Condvar::new(),
            has_room: Condvar::new(),
        }
    }

    pub(crate) fn submit(&self, load: Load<X>) -> Result<(), LanesError> {
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

    /// The next batch for a lane, or why there is none. Blocks, unless a stage has
    /// reported more outcomes than the lane has `seen`.
    pub(crate) fn take(&self, broken: impl Fn() -> bool, seen: &mut u64) -> Work<X> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() || state.is_over() {
                return Work::Over(Sent::All);
            }
            if broken() {
                // This lane may have been woken for a batch: another must take it.
                self.work.notify_one();
                return Work::Over(Sent::UntilBroken);
            }
            if let Some(load) = state.next() {
                return Work::Send(load);
            }
            if *seen != state.settled {
                *seen = state.settled;
                return Work::Settled;
            }
            self.work.wait(&mut state);
        }
    }

    /// The destination has room for this many batches of blocks, counted from the
    /// first ever sent. The number never falls.
    pub(crate) fn set_block_room(&self, batches: u64) {
        let mut state = self.state.lock();
        let known = state.block_room.unwrap_or(0);
        state.block_room = Some(known.max(batches));
        drop(state);
        self.work.notify_all();
    }

    /// Notes that a batch is placed, or its blocks accepted. Its buffer returns to
    /// the pool here.
    pub(crate) fn placed(&self, load: Load<X>) {
        let amount = load.amount();
        load.acknowledged();
        let mut state = self.state.lock();
        state.out -= 1;
        match amount {
            Amount::Pages { body_bytes, fill_bytes } => {
                state.pages_out -= 1;
                state.delivered.batches += 1;
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
        self.has_less(state);
    }

    /// Notes that less is in flight.
    fn has_less(&self, mut state: MutexGuard<'_, State<X>>) {
        self.has_room.notify_one();
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

    /// Notes that pages of a batch that a lane has taken are not sent.
    pub(crate) fn dropped(&self, pages: usize) {
        if pages > 0 {
            let bytes = pages as u64 * page::PAGE_BYTES as u64;
            let mut state = self.state.lock();
            state.delivered.backlog_bytes -= bytes;
            state.delivered.dropped_bytes += bytes;
        }
    }

    /// Takes back the unacknowledged batches of a dead lane. Other lanes send them
    /// first, because they are the oldest. After a failure they are dropped, which
    /// notifies their issuers.
    pub(crate) fn hand_back(&self, loads: impl DoubleEndedIterator<Item = Load<X>>) {
        let mut state = self.state.lock();
        if state.failed.is_some() {
            drop(state);
            drop(loads.collect::<Vec<_>>());
            return;
        }
        for load in loads.rev() {
            state.again.push_front(load);
        }
        drop(state);
        self.work.notify_all();
    }

    /// Wakes all lanes, so that one notices that its connection broke.
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
            self.over.notify_all();
        }
    }

    /// Notes that a lane has no connection. Fails everything if all lanes have been
    /// down for too long; returns whether to try again, after `pause`.
    pub(crate) fn could_not_connect(&self, why: &str, pause: Pause) -> bool {
        let mut state = self.state.lock();
        if state.alive == 0 && state.none_alive_since.elapsed() > ALL_DEAD_MAX {
            drop(state);
            let seconds = ALL_DEAD_MAX.as_secs();
            self.fail(LanesError::AllDead { seconds, last: why.to_owned() });
            return false;
        }
        let begins = Instant::now();
        loop {
            if state.failed.is_some() || state.is_over() {
                return false;
            }
            let wait = if state.alive == 0 { pause.alone } else { pause.beside_others };
            if self.over.wait_until(&mut state, begins + wait).timed_out() {
                return true;
            }
        }
    }

    /// Blocks until everything submitted is placed.
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

    /// Accepts no more batches; lanes end once everything is delivered.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake_for_end();
    }

    /// Ends everything now; waiting batches are dropped.
    pub fn fail(&self, error: LanesError) {
        let mut state = self.state.lock();
        state.failed.get_or_insert(error);
        let State { again, held, first, waiting, .. } = &mut *state;
        let lost = [again, held, first, waiting].map(std::mem::take);
        drop(state);
        self.wake_for_end();
        self.drained.notify_all();
        // Dropping notifies their issuers, so it happens without the queue's lock.
        drop(lost);
    }

    fn wake_for_end(&self) {
        self.work.notify_all();
        self.has_room.notify_all();
        self.over.notify_all();
    }

    pub(crate) fn failure(&self) -> Option<LanesError> {
        self.state.lock().failed.clone()
    }

    pub(crate) fn delivered(&self) -> Delivered {
        let state = self.state.lock();
        let mut delivered = state.delivered;
        delivered.blocks_held = state.held.len() as u64;
        if let Some(since) = state.busy_since {
            delivered.busy += since.elapsed();
        }
        delivered
    }
}
