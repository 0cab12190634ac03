//! The unacknowledged batches of one connection.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use wire::Answer;

use crate::load::Load;
use crate::window::{Departure, Window};

/// The batches of one connection between write and acknowledgement.
///
/// An acknowledgement can overtake the sender, which notes a batch only after the
/// write has returned. Hence there are two counts, and whichever thread comes second
/// releases the batch.
#[derive(Debug)]
pub(crate) struct Flight<X> {
    state: Mutex<State<X>>,
    broken: AtomicBool,
    /// Wakes the sender: less is in flight.
    has_room: Condvar,
    window_bytes: AtomicU64,
}

#[derive(Debug)]
struct State<X> {
    sent: VecDeque<Sent<X>>,
    /// Bytes of buffers of the batches in flight, and of those ever delivered.
    sent_bytes: u64,
    delivered_bytes: u64,
    /// Loads in flight that a stage sent. Their answers may be late, and the batches
    /// after them are acknowledged only later.
    asking: usize,
    window: Window,
    /// Batches that were being written when the connection broke.
    unsent: Vec<Load<X>>,
    released: u64,
    acknowledged: u64,
    /// Answers to queries, in order of the batch that each one acknowledges.
    answers: VecDeque<Answer>,
}

#[derive(Debug)]
struct Sent<X> {
    load: Load<X>,
    bytes: u64,
    departure: Departure,
}

impl<X> Default for Flight<X> {
    fn default() -> Self {
        let state = State {
            sent: VecDeque::new(),
            sent_bytes: 0,
            delivered_bytes: 0,
            asking: 0,
            window: Window::default(),
            unsent: Vec::new(),
            released: 0,
            acknowledged: 0,
            answers: VecDeque::new(),
        };
        Self {
            window_bytes: AtomicU64::new(state.window.bytes()),
            state: Mutex::new(state),
            broken: AtomicBool::new(false),
            has_room: Condvar::new(),
        }
    }
}

impl<X> Flight<X> {
    /// Blocks while the window is full, unless the connection breaks.
    pub(crate) fn wait_for_room(&self) {
        let mut state = self.state.lock();
        while !state.has_room() && !self.is_broken() {
            self.has_room.wait(&mut state);
        }
    }

    /// The departure of a batch that is sent now.
    pub(crate) fn departure(&self) -> Departure {
        let delivered_bytes = self.state.lock().delivered_bytes;
        Departure { at: Instant::now(), delivered_bytes }
    }

    /// Bytes of buffers that may be in flight.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.window_bytes.load(Relaxed)
    }

    /// Notes a written batch.
    pub(crate) fn sent(&self, load: Load<X>, departure: Departure) {
        let mut state = self.state.lock();
        let bytes = load.buffer_bytes();
        state.sent_bytes += bytes;
        state.asking += usize::from(load.is_other());
        state.sent.push_back(Sent { load, bytes, departure });
    }

    /// Notes a batch that was not written; another connection sends it.
    pub(crate) fn not_sent(&self, load: Load<X>) {
        self.state.lock().unsent.push(load);
    }

    /// Notes that the destination has placed `placed` batches of this connection.
    /// None if the count falls, or includes batches that were never sent.
    pub(crate) fn acknowledged(&self, placed: u64) -> Option<()> {
        self.state.lock().acknowledge(placed)
    }

    /// As [`Flight::acknowledged`], with an answer to the last of them.
    pub(crate) fn answered(&self, answer: Answer) -> Option<()> {
        let mut state = self.state.lock();
        if answer.placed <= state.acknowledged {
            return None;
        }
        state.acknowledge(answer.placed)?;
        state.answers.push_back(answer);
        Some(())
    }

    /// The next batch that is both written and acknowledged, and the answer to it.
    pub(crate) fn release(&self) -> Option<(Load<X>, Option<Answer>)> {
        let mut state = self.state.lock();
        if state.released == state.acknowledged {
            return None;
        }
        let sent = state.sent.pop_front()?;
        let load = state.leaves(sent);
        self.window_bytes.store(state.window.bytes(), Relaxed);
        self.has_room.notify_one();
        state.released += 1;
        let number = state.released;
        let is_its = state.answers.front().is_some_and(|answer| answer.placed == number);
        let answer = if is_its { state.answers.pop_front() } else { None };
        Some((load, answer))
    }

    /// Marks the connection as broken.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, SeqCst);
        // A thread that was about to wait has seen the mark, or waits by now.
        drop(self.state.lock());
        self.has_room.notify_all();
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(SeqCst)
    }

    /// Whether batches were sent, or were to be, and none of them was acknowledged.
    pub(crate) fn was_in_vain(&self) -> bool {
        let state = self.state.lock();
        state.released == 0 && !(state.sent.is_empty() && state.unsent.is_empty())
    }

    /// The unacknowledged batches, oldest first.
    pub(crate) fn hand_back(&self) -> impl DoubleEndedIterator<Item = Load<X>> + use<X> {
        let mut state = self.state.lock();
        let (sent, unsent) = (std::mem::take(&mut state.sent), std::mem::take(&mut state.unsent));
        sent.into_iter().map(|sent| sent.load).chain(unsent)
    }
}

impl<X> State<X> {
    fn has_room(&self) -> bool {
        self.asking > 0 || self.sent_bytes < self.window.bytes()
    }

    /// Removes an acknowledged batch.
    fn leaves(&mut self, sent: Sent<X>) -> Load<X> {
        let Sent { load, bytes, departure } = sent;
        self.sent_bytes -= bytes;
        self.delivered_bytes += bytes;
        self.asking -= usize::from(load.is_other());
        self.window.delivered(departure, self.delivered_bytes, Instant::now());
        load
    }

    fn acknowledge(&mut self, placed: u64) -> Option<()> {
        // The batch that is being written counts as sent.
        let sent = self.released + self.sent.len() as u64 + 1;
        if placed < self.acknowledged || placed > sent {
            return None;
        }
        self.acknowledged = placed;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use page::{PageSet, Pool};

    use super::*;

    fn load(nth: u8) -> Load<u8> {
        Load::Other(nth)
    }

    fn released(flight: &Flight<u8>) -> Vec<(u8, Option<u128>)> {
        let each = std::iter::from_fn(|| flight.release());
        let number = |(load, answer): (Load<u8>, Option<Answer>)| match load {
            Load::Other(nth) => (nth, answer.map(|answer| answer.requested.bits())),
            _ => panic!("that was not sent"),
        };
        each.map(number).collect()
    }

    #[test]
    fn only_what_was_sent_is_acknowledged_and_never_less_than_before() {
        let flight = Flight::default();
        flight.sent(load(1), flight.departure());
        flight.sent(load(2), flight.departure());
        assert_eq!(flight.acknowledged(4), None, "two are sent, and one may be just now");
        assert_eq!(flight.acknowledged(u64::MAX), None);
        assert_eq!(flight.acknowledged(1), Some(()));
        assert_eq!(released(&flight), [(1, None)]);
        assert_eq!(flight.acknowledged(1), Some(()), "once more is the same");
        assert_eq!(released(&flight), []);
        assert_eq!(flight.acknowledged(3), Some(()), "the third overtakes its sender");
        assert_eq!(released(&flight), [(2, None)]);
        assert_eq!(flight.acknowledged(4), None);
        assert_eq!(flight.acknowledged(2), None);
        flight.sent(load(3), flight.departure());
        assert_eq!(released(&flight), [(3, None)]);
    }

    #[test]
    fn an_answer_comes_with_the_batch_that_asked() {
        let flight = Flight::default();
        let answer = |placed, wanted| {
            let wanted = PageSet::from_bits(wanted);
            Answer { placed, requested: wanted, ..Answer::default() }
        };
        (1..6).for_each(|nth| flight.sent(load(nth), flight.departure()));
        assert_eq!(flight.acknowledged(1), Some(()));
        assert_eq!(flight.answered(answer(1, 7)), None, "it was acknowledged");
        assert_eq!(flight.answered(answer(3, 8)), Some(()));
        assert_eq!(flight.answered(answer(3, 8)), None, "it was answered");
        assert_eq!(flight.answered(answer(4, 9)), Some(()));
        assert_eq!(released(&flight), [(1, None), (2, None), (3, Some(8)), (4, Some(9))]);
        assert_eq!(flight.answered(answer(7, 9)), None, "it is not sent");
    }

    /// A batch with its buffer full.
    fn pages(pool: &std::sync::Arc<Pool>) -> Load<u8> {
        let mut batch = pool.take().unwrap();
        let pages = batch.room();
        for page in 0..pages {
            batch.push_body(page::PageIndex(u32::try_from(page).unwrap()), page * page::PAGE_BYTES);
        }
        Load::from(batch)
    }

    #[test]
    fn no_more_is_sent_than_the_window_allows_until_some_is_acknowledged_or_asks() {
        let (flight, pool) = (Flight::default(), Pool::new(64 << 20));
        let has_room = || flight.state.lock().has_room();
        let fill = || {
            let mut sent = 0;
            while has_room() {
                flight.wait_for_room();
                flight.sent(pages(&pool), flight.departure());
                sent += 1;
            }
            sent
        };
        let first = fill();
        assert!(first > 1 && first < 64, "{first}");
        flight.acknowledged(1).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| flight.wait_for_room());
            assert!(matches!(flight.release(), Some((Load::Pages(_), None))));
            waits.join().unwrap();
        });
        assert!(fill() > 0);
        flight.sent(load(1), flight.departure());
        assert!(has_room(), "it may be answered late");
        flight.sent(pages(&pool), flight.departure());
        std::thread::scope(|scope| {
            flight.state.lock().asking = 0;
            let waits = scope.spawn(|| flight.wait_for_room());
            flight.break_off();
            waits.join().unwrap();
        });
    }

    /// Otherwise a lane that is dead would take batches until the pool is empty.
    #[test]
    fn a_batch_with_few_bytes_counts_as_a_full_one() {
        let pool = Pool::new(64 << 20);
        let full = || pages(&pool);
        let fills = || -> Load<u8> {
            let mut batch = pool.take().unwrap();
            batch.push_fill(page::PageIndex(7), 0);
            Load::from(batch)
        };
        let blocks = || -> Load<u8> {
            let mut blocks = pool.take_blocks().unwrap();
            blocks.push_zero(4096);
            Load::from(blocks)
        };
        let all: [&dyn Fn() -> Load<u8>; 3] = [&full, &fills, &blocks];
        let fit = all.map(|take| {
            let (flight, mut sent) = (Flight::default(), 0);
            while sent < 64 && flight.state.lock().has_room() {
                flight.sent(take(), flight.departure());
                sent += 1;
            }
            sent
        });
        assert!(fit[0] > 1 && fit == [fit[0]; 3], "{fit:?}");
    }

    #[test]
    fn unacknowledged_batches_go_back_in_order() {
        let flight = Flight::default();
        assert!(!flight.was_in_vain(), "there was nothing to deliver");
        (1..4).for_each(|nth| flight.sent(load(nth), flight.departure()));
        assert!(flight.was_in_vain());
        flight.not_sent(load(4));
        let pool = Pool::new(1);
        flight.not_sent(Load::from(pool.take().unwrap()));
        assert_eq!(flight.acknowledged(5), None, "what was not sent does not count");
        flight.acknowledged(1).unwrap();
        assert_eq!(released(&flight).len(), 1);
        assert!(!flight.was_in_vain());
        let back: Vec<_> = flight.hand_back().collect();
        assert!(matches!(
            back[..],
            [Load::Other(2), Load::Other(3), Load::Other(4), Load::Pages(_)]
        ));
    }
}
