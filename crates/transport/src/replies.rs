//! The destination's replies on one lane: acknowledgements, and answers to queries,
//! which may take a while. The lane continues meanwhile.
//!
//! Replies are cumulative: each one covers all batches before it. So batches after an
//! open query are acknowledged only with its answer, and the lane itself may have
//! nothing to send by then.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use identity::{Closer, Writer};
use page::PageSet;
use parking_lot::Mutex;
use wire::{Ack, Answer};

/// One lane's writing half, shared with the threads that answer.
#[derive(Debug)]
pub(crate) struct Replies<W> {
    state: Mutex<State<W>>,
}

#[derive(Debug)]
struct State<W> {
    writer: W,
    /// Queries not yet answered to the source, in order.
    open: VecDeque<Open>,
    /// All batches up to this one are done, except open queries.
    due: u64,
    /// The source was notified of all batches up to this one.
    said: u64,
}

#[derive(Debug)]
struct Open {
    /// The number of its batch, from 1.
    number: u64,
    answer: Option<(PageSet, PageSet)>,
}

/// A query without an answer yet. Dropping it unanswered ends the lane, so that the
/// source queries again.
#[derive(Debug)]
#[must_use = "the source waits for it"]
pub struct Question {
    replies: Arc<Replies<Writer>>,
    closer: Closer,
    number: u64,
    is_answered: bool,
}

impl<W: Write> Replies<W> {
    pub(crate) fn new(writer: W) -> Arc<Self> {
        let state = State { writer, open: VecDeque::new(), due: 0, said: 0 };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Acknowledges `batches` batches, except open queries.
    pub(crate) fn acknowledge(&self, batches: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.due = batches;
        state.say_due()
    }

    /// Batch `number` is a query; all batches before it are done.
    fn opens(&self, number: u64) {
        let mut state = self.state.lock();
        state.due = state.due.max(number);
        state.open.push_back(Open { number, answer: None });
    }

    fn answer(&self, number: u64, wanted: PageSet, later: PageSet) -> io::Result<()> {
        let mut state = self.state.lock();
        if let Some(question) = state.open.iter_mut().find(|question| question.number == number) {
            question.answer = Some((wanted, later));
        }
        state.say_answers()
    }
}

impl Replies<Writer> {
    /// Opens the query of batch `number` of this lane.
    pub(crate) fn question(self: &Arc<Self>, closer: &Closer, number: u64) -> Question {
        self.opens(number);
        Question { replies: Arc::clone(self), closer: closer.clone(), number, is_answered: false }
    }

    /// Closes the connection in an orderly way.
    pub(crate) fn close(&self) {
        self.state.lock().writer.close();
    }
}

impl<W: Write> State<W> {
    /// Sends the answers that have no open query before them.
    fn say_answers(&mut self) -> io::Result<()> {
        while let Some(&Open { number, answer: Some((wanted, later)) }) = self.open.front() {
            self.open.pop_front();
            // This answer may be the only acknowledgement of the batch before it.
            let answer = Answer { placed: number, requested: wanted, later };
            self.writer.write_all(&answer.to_bytes())?;
            self.said = number;
        }
        self.say_due()
    }

    fn say_due(&mut self) -> io::Result<()> {
        let next = self.open.front().map_or(u64::MAX, |question| question.number);
        let placed = self.due.min(next - 1);
        if placed > self.said {
            self.writer.write_all(&Ack { placed }.to_bytes())?;
            self.said = placed;
        }
        Ok(())
    }
}

impl Question {
    /// Answers: the source must send the pages in `wanted`, those in `later` will come
    /// from other providers, and all others are placed.
    pub fn answer(mut self, wanted: PageSet, later: PageSet) {
        self.is_answered = true;
        if self.replies.answer(self.number, wanted, later).is_err() {
            // The lane's reader then finds the end, too.
            self.closer.close();
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if !self.is_answered {
            self.closer.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Said {
        Ack(u64),
        Answer(u64, u128),
    }

    fn answer(replies: &Replies<Vec<u8>>, number: u64, wanted: u64) {
        let wanted = PageSet::from_bits(wanted.into());
        replies.answer(number, wanted, PageSet::NONE).unwrap();
    }

    /// The replies since the last call.
    fn said(replies: &Replies<Vec<u8>>) -> Vec<Said> {
        let bytes = std::mem::take(&mut replies.state.lock().writer);
        let (mut rest, mut said) = (&bytes[..], Vec::new());
        while let Some(start) = rest.first_chunk() {
            if Answer::begins(start) {
                let (bytes, more) = rest.split_first_chunk().unwrap();
                let answer = Answer::parse(bytes).unwrap();
                said.push(Said::Answer(answer.placed, answer.requested.bits()));
                rest = more;
            } else {
                let (bytes, more) = rest.split_first_chunk().unwrap();
                said.push(Said::Ack(Ack::parse(bytes).unwrap().placed));
                rest = more;
            }
        }
        said
    }

    #[test]
    fn batches_after_a_query_are_acknowledged_with_its_answer() {
        let replies = Replies::new(Vec::new());
        replies.acknowledge(1).unwrap();
        replies.opens(3);
        replies.acknowledge(5).unwrap();
        assert_eq!(said(&replies), [Said::Ack(1), Said::Ack(2)]);
        // The lane has read everything and never acknowledges again.
        answer(&replies, 3, 9);
        assert_eq!(said(&replies), [Said::Answer(3, 9), Said::Ack(5)]);
    }

    #[test]
    fn answers_are_sent_in_the_order_of_their_queries() {
        let replies = Replies::new(Vec::new());
        replies.opens(1);
        replies.opens(2);
        replies.opens(4);
        answer(&replies, 2, 7);
        replies.acknowledge(4).unwrap();
        assert_eq!(said(&replies), []);
        answer(&replies, 1, 6);
        assert_eq!(said(&replies), [Said::Answer(1, 6), Said::Answer(2, 7), Said::Ack(3)]);
        answer(&replies, 4, 5);
        assert_eq!(said(&replies), [Said::Answer(4, 5)]);
    }

    proptest! {
        /// Batches arrive, some are acknowledged, and queries among them are answered in
        /// any order: in the end the source was notified of each, in order.
        #[test]
        fn every_batch_is_reported_once_and_in_order(
            batches in prop::collection::vec((any::<bool>(), any::<bool>()), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 40),
        ) {
            let replies = Replies::new(Vec::new());
            let (mut open, mut received) = (Vec::new(), Vec::new());
            let mut order = order.into_iter();
            for (number, (asks, acknowledges)) in (1_u64..).zip(&batches) {
                if *asks {
                    replies.opens(number);
                    open.push(number);
                }
                if *acknowledges {
                    replies.acknowledge(number).unwrap();
                }
                if let Some(index) = order.next().filter(|_| open.len() > 3) {
                    let number = open.remove(index.index(open.len()));
                    answer(&replies, number, number);
                }
                received.extend(said(&replies));
            }
            replies.acknowledge(batches.len() as u64).unwrap();
            for number in open.into_iter().rev() {
                answer(&replies, number, number);
            }
            received.extend(said(&replies));
            let mut last = 0;
            for said in received {
                let (Said::Ack(placed) | Said::Answer(placed, _)) = said;
                prop_assert!(placed > last);
                // A batch that is passed over is no query, nor is an acknowledged one.
                let asked = |number: u64| batches[usize::try_from(number).unwrap() - 1].0;
                prop_assert!((last + 1..placed).all(|number| !asked(number)));
                match said {
                    Said::Ack(placed) => prop_assert!(!asked(placed)),
                    Said::Answer(placed, wanted) => prop_assert_eq!(wanted, u128::from(placed)),
                }
                last = placed;
            }
            prop_assert_eq!(last, batches.len() as u64);
        }
    }
}
