//! What one connection has sent and not yet heard of.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use parking_lot::Mutex;
use wire::Answer;

use crate::load::Load;
use crate::queue::Queue;

/// The batches of one connection between write and acknowledgement.
///
/// An acknowledgement can overtake the sender, which notes a batch only once
/// the write returned: hence both counts, and whoever comes second releases.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    state: Mutex<State>,
    broken: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    sent: VecDeque<Load>,
    released: u64,
    acknowledged: u64,
    /// Answers to batches of names, by how many are acknowledged with each.
    answers: VecDeque<Answer>,
}

impl Flight {
    /// A batch is written. Returns how many are released by it, or nothing if the
    /// destination had said of it what can't be.
    pub(crate) fn sent(&self, load: Load, queue: &Queue) -> Option<u64> {
        let mut state = self.state.lock();
        state.sent.push_back(load);
        release(&mut state, queue)
    }

    /// The destination has placed `placed` batches of this connection.
    /// Returns how many are released by it, or nothing if it counts backwards, or
    /// batches that were never sent.
    pub(crate) fn acknowledged(&self, placed: u64, queue: &Queue) -> Option<u64> {
        let mut state = self.state.lock();
        state.acknowledge(placed)?;
        release(&mut state, queue)
    }

    /// As [`Flight::acknowledged`], with an answer to the last of them.
    pub(crate) fn answered(&self, answer: Answer, queue: &Queue) -> Option<u64> {
        let mut state = self.state.lock();
        if answer.placed <= state.acknowledged {
            return None;
        }
        state.acknowledge(answer.placed)?;
        state.answers.push_back(answer);
        release(&mut state, queue)
    }

    /// The connection is of no use any more.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, SeqCst);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(SeqCst)
    }

    /// Gives what was not acknowledged back to the queue.
    pub(crate) fn hand_back(&self, queue: &Queue) {
        let sent = std::mem::take(&mut self.state.lock().sent);
        queue.hand_back(sent.into_iter());
    }
}

impl State {
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

fn release(state: &mut State, queue: &Queue) -> Option<u64> {
    let mut count = 0;
    while state.released < state.acknowledged {
        let Some(load) = state.sent.pop_front() else { break };
        state.released += 1;
        count += 1;
        let number = state.released;
        let is_its = state.answers.front().is_some_and(|answer| answer.placed == number);
        let answer = if is_its { state.answers.pop_front() } else { None };
        match (load, answer) {
            (Load::Query(named), Some(Answer { wanted, later, .. })) => {
                queue.answered(named, wanted, later).ok()?;
            }
            (Load::LightQuery(asked), Some(Answer { wanted, later, .. })) => {
                queue.answered_of(asked, wanted, later).ok()?;
            }
            // An answer to what was no question, or a question without one.
            (Load::Query(_) | Load::LightQuery(_), None) | (_, Some(_)) => return None,
            (load, None) => queue.placed(load),
        }
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use page::Pool;

    use super::*;

    #[test]
    fn only_what_was_sent_is_acknowledged_and_never_less_than_before() {
        let (queue, flight) = (Queue::new(), Flight::default());
        let pool = Pool::new(8 << 20);
        let send = || {
            let load = Load::from(pool.take().unwrap());
            queue.submit(load).unwrap();
            let crate::queue::Work::Send(load) = queue.take(|| false, None) else { panic!() };
            flight.sent(load, &queue)
        };
        assert_eq!((send(), send()), (Some(0), Some(0)));
        assert_eq!(flight.acknowledged(4, &queue), None, "two are sent, and one may be just now");
        assert_eq!(flight.acknowledged(u64::MAX, &queue), None);
        assert_eq!(flight.acknowledged(1, &queue), Some(1));
        assert_eq!(flight.acknowledged(1, &queue), Some(0), "once more is the same");
        assert_eq!(flight.acknowledged(3, &queue), Some(1), "the third overtakes its sender");
        assert_eq!(flight.acknowledged(4, &queue), None);
        assert_eq!(flight.acknowledged(2, &queue), None);
        assert_eq!(send(), Some(1));
        queue.close();
        queue.wait_drained().unwrap();
    }

    #[test]
    fn names_are_answered_and_nothing_else_is() {
        let pool = Pool::new(8 << 20);
        let named = |ticket| {
            let mut batch = pool.take().unwrap();
            (0..3).for_each(|page| batch.push_body(page::PageIndex(page), 4096 * page as usize));
            Load::Query(crate::load::Query { batch, ticket })
        };
        let flying = |load: Load| {
            let (queue, flight) = (Queue::new(), Flight::default());
            if let Load::Query(_) = load {
                queue.asks();
            }
            queue.submit(load).unwrap();
            let crate::queue::Work::Send(load) = queue.take(|| false, None) else { panic!() };
            flight.sent(load, &queue).unwrap();
            (queue, flight)
        };
        let answer = |wanted, later| Answer { placed: 1, wanted, later };
        let (queue, flight) = flying(named(1));
        assert_eq!(flight.acknowledged(1, &queue), None, "a question wants an answer");
        let (queue, flight) = flying(Load::from(pool.take().unwrap()));
        assert_eq!(flight.answered(answer(0, 0), &queue), None, "nothing was asked");
        for (wanted, later) in [(8, 0), (0, 8), (1 << 127, 0)] {
            let (queue, flight) = flying(named(1));
            assert_eq!(flight.answered(answer(wanted, later), &queue), None, "there are three");
        }
        let (queue, flight) = flying(named(1));
        assert_eq!(flight.answered(answer(0b001, 0b100), &queue), Some(1));
        assert_eq!(flight.answered(answer(0, 0), &queue), None, "it was answered");
        let delivered = queue.delivered();
        assert_eq!((delivered.named_bytes, delivered.pending_bytes), (4096, 4096));
        let crate::queue::Work::Send(Load::Requested(batch)) = queue.take(|| false, None) else {
            panic!()
        };
        assert_eq!(batch.bodies().iter().map(|body| body.page.0).collect::<Vec<_>>(), [0]);
        queue.placed(Load::Requested(batch));
        queue.late(1, vec![2], false).unwrap();
        let crate::queue::Work::Send(Load::Reread(reread)) = queue.take(|| false, None) else {
            panic!()
        };
        assert_eq!(reread.pages, [page::PageIndex(2)]);
        queue.placed(Load::Reread(reread));
        queue.close();
        queue.wait_drained().unwrap();
        assert_eq!(queue.delivered().backlog_bytes, 0);
    }
}
