//! What one connection has sent and not yet heard of.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use parking_lot::Mutex;
use wire::Answer;

use crate::load::Load;

/// The batches of one connection between write and acknowledgement.
///
/// An acknowledgement can overtake the sender, which notes a batch only once
/// the write returned: hence both counts, and whoever comes second releases.
#[derive(Debug)]
pub(crate) struct Flight<X> {
    state: Mutex<State<X>>,
    broken: AtomicBool,
}

#[derive(Debug)]
struct State<X> {
    sent: VecDeque<Load<X>>,
    /// What was to be sent when the connection broke.
    unsent: Vec<Load<X>>,
    released: u64,
    acknowledged: u64,
    /// Answers to batches that ask, by how many are acknowledged with each.
    answers: VecDeque<Answer>,
}

impl<X> Default for Flight<X> {
    fn default() -> Self {
        let (sent, answers) = (VecDeque::new(), VecDeque::new());
        let state = State { sent, unsent: Vec::new(), released: 0, acknowledged: 0, answers };
        Self { state: Mutex::new(state), broken: AtomicBool::new(false) }
    }
}

impl<X> Flight<X> {
    /// A batch is written.
    pub(crate) fn sent(&self, load: Load<X>) {
        self.state.lock().sent.push_back(load);
    }

    /// A batch is not written: another connection carries it.
    pub(crate) fn not_sent(&self, load: Load<X>) {
        self.state.lock().unsent.push(load);
    }

    /// The destination has placed `placed` batches of this connection. None if it
    /// counts backwards, or batches that were never sent.
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
        let load = state.sent.pop_front()?;
        state.released += 1;
        let number = state.released;
        let is_its = state.answers.front().is_some_and(|answer| answer.placed == number);
        let answer = if is_its { state.answers.pop_front() } else { None };
        Some((load, answer))
    }

    /// The connection is of no use any more.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, SeqCst);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(SeqCst)
    }

    /// What was not acknowledged, the oldest first.
    pub(crate) fn hand_back(&self) -> impl DoubleEndedIterator<Item = Load<X>> + use<X> {
        let mut state = self.state.lock();
        let (sent, unsent) = (std::mem::take(&mut state.sent), std::mem::take(&mut state.unsent));
        sent.into_iter().chain(unsent)
    }
}

impl<X> State<X> {
    fn acknowledge(&mut self, placed: u64) -> Option<()> {
        // And the one that is being written.
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
    use page::Pool;

    use super::*;

    fn load(nth: u8) -> Load<u8> {
        Load::Other(nth)
    }

    fn released(flight: &Flight<u8>) -> Vec<(u8, Option<u128>)> {
        let each = std::iter::from_fn(|| flight.release());
        let number = |(load, answer): (Load<u8>, Option<Answer>)| match load {
            Load::Other(nth) => (nth, answer.map(|answer| answer.wanted)),
            _ => panic!("that was not sent"),
        };
        each.map(number).collect()
    }

    #[test]
    fn only_what_was_sent_is_acknowledged_and_never_less_than_before() {
        let flight = Flight::default();
        flight.sent(load(1));
        flight.sent(load(2));
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
        flight.sent(load(3));
        assert_eq!(released(&flight), [(3, None)]);
    }

    #[test]
    fn an_answer_comes_with_the_batch_that_asked() {
        let flight = Flight::default();
        let answer = |placed, wanted| Answer { placed, wanted, later: 0 };
        (1..6).for_each(|nth| flight.sent(load(nth)));
        assert_eq!(flight.acknowledged(1), Some(()));
        assert_eq!(flight.answered(answer(1, 7)), None, "it was acknowledged");
        assert_eq!(flight.answered(answer(3, 8)), Some(()));
        assert_eq!(flight.answered(answer(3, 8)), None, "it was answered");
        assert_eq!(flight.answered(answer(4, 9)), Some(()));
        assert_eq!(released(&flight), [(1, None), (2, None), (3, Some(8)), (4, Some(9))]);
        assert_eq!(flight.answered(answer(7, 9)), None, "it is not sent");
    }

    #[test]
    fn what_was_not_acknowledged_goes_back_in_its_order() {
        let flight = Flight::default();
        (1..4).for_each(|nth| flight.sent(load(nth)));
        flight.not_sent(load(4));
        let pool = Pool::new(1);
        flight.not_sent(Load::from(pool.take().unwrap()));
        assert_eq!(flight.acknowledged(5), None, "what was not sent does not count");
        flight.acknowledged(1).unwrap();
        assert_eq!(released(&flight).len(), 1);
        let back: Vec<_> = flight.hand_back().collect();
        assert!(matches!(
            back[..],
            [Load::Other(2), Load::Other(3), Load::Other(4), Load::Pages(_)]
        ));
    }
}
