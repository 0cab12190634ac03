//! What the destination says on one lane: acknowledgements, and answers to batches
//! that ask, which may take a while. The lane goes on meanwhile.
//!
//! Whatever is said counts for all batches before it. So what came after a question
//! is acknowledged only once that is answered: it is due until then, and goes with
//! the answer. The lane itself may have nothing more to say by that time.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use identity::{Closer, Writer};
use parking_lot::Mutex;
use wire::{Ack, Answer};

/// One lane's writing half, shared with whoever answers.
#[derive(Debug)]
pub(crate) struct Replies<W> {
    state: Mutex<State<W>>,
}

#[derive(Debug)]
struct State<W> {
    writer: W,
    /// Questions that are not answered to the source yet, in their order.
    open: VecDeque<Open>,
    /// All batches up to this one are dealt with, but for open questions.
    due: u64,
    /// The source knows of all up to this one.
    said: u64,
}

#[derive(Debug)]
struct Open {
    /// Its batch, counted from one.
    number: u64,
    answer: Option<(u128, u128)>,
}

/// A batch that asks, and has no answer yet. If it is dropped without one the lane ends,
/// so that the source asks again.
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

    /// So many batches are dealt with, but for questions.
    pub(crate) fn acknowledge(&self, batches: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.due = batches;
        state.say_due()
    }

    /// Batch `number` asks; all before it are dealt with.
    fn opens(&self, number: u64) {
        let mut state = self.state.lock();
        state.due = state.due.max(number);
        state.open.push_back(Open { number, answer: None });
    }

    fn answer(&self, number: u64, wanted: u128, later: u128) -> io::Result<()> {
        let mut state = self.state.lock();
        if let Some(question) = state.open.iter_mut().find(|question| question.number == number) {
            question.answer = Some((wanted, later));
        }
        state.say_answers()
    }
}

impl Replies<Writer> {
    /// Batch `number`, which came by this lane, asks.
    pub(crate) fn question(self: &Arc<Self>, closer: &Closer, number: u64) -> Question {
        self.opens(number);
        Question { replies: Arc::clone(self), closer: closer.clone(), number, is_answered: false }
    }

    /// Ends the connection in order.
    pub(crate) fn close(&self) {
        self.state.lock().writer.close();
    }
}

impl<W: Write> State<W> {
    /// What was answered, as far as nothing before it is open.
    fn say_answers(&mut self) -> io::Result<()> {
        while let Some(&Open { number, answer: Some((wanted, later)) }) = self.open.front() {
            self.open.pop_front();
            // One before it may be acknowledged by this one alone.
            let answer = Answer { placed: number, wanted, later };
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
    /// Those with these bits are wanted, and those come later; all others are placed.
    pub fn answer(mut self, wanted: u128, later: u128) {
        self.is_answered = true;
        if self.replies.answer(self.number, wanted, later).is_err() {
            // Its reader finds the end, too.
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

    /// What was said since the last time.
    fn said(replies: &Replies<Vec<u8>>) -> Vec<Said> {
        let bytes = std::mem::take(&mut replies.state.lock().writer);
        let (mut rest, mut said) = (&bytes[..], Vec::new());
        while let Some(start) = rest.first_chunk() {
            if Answer::begins(start) {
                let (bytes, more) = rest.split_first_chunk().unwrap();
                let answer = Answer::parse(bytes).unwrap();
                said.push(Said::Answer(answer.placed, answer.wanted));
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
    fn what_came_after_a_question_is_acknowledged_with_its_answer() {
        let replies = Replies::new(Vec::new());
        replies.acknowledge(1).unwrap();
        replies.opens(3);
        replies.acknowledge(5).unwrap();
        assert_eq!(said(&replies), [Said::Ack(1), Said::Ack(2)]);
        // The lane has read all, and never says anything again.
        replies.answer(3, 9, 0).unwrap();
        assert_eq!(said(&replies), [Said::Answer(3, 9), Said::Ack(5)]);
    }

    #[test]
    fn answers_go_in_the_order_of_their_questions() {
        let replies = Replies::new(Vec::new());
        replies.opens(1);
        replies.opens(2);
        replies.opens(4);
        replies.answer(2, 7, 0).unwrap();
        replies.acknowledge(4).unwrap();
        assert_eq!(said(&replies), []);
        replies.answer(1, 6, 0).unwrap();
        assert_eq!(said(&replies), [Said::Answer(1, 6), Said::Answer(2, 7), Said::Ack(3)]);
        replies.answer(4, 5, 0).unwrap();
        assert_eq!(said(&replies), [Said::Answer(4, 5)]);
    }

    proptest! {
        /// Batches come, acknowledged now and then, and questions among them are
        /// answered in any order: in the end the source has heard of each, in order.
        #[test]
        fn all_is_said_once_and_in_order(
            batches in prop::collection::vec((any::<bool>(), any::<bool>()), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 40),
        ) {
            let replies = Replies::new(Vec::new());
            let (mut open, mut heard) = (Vec::new(), Vec::new());
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
                    replies.answer(number, u128::from(number), 0).unwrap();
                }
                heard.extend(said(&replies));
            }
            replies.acknowledge(batches.len() as u64).unwrap();
            for number in open.into_iter().rev() {
                replies.answer(number, u128::from(number), 0).unwrap();
            }
            heard.extend(said(&replies));
            let mut last = 0;
            for said in heard {
                let (Said::Ack(placed) | Said::Answer(placed, _)) = said;
                prop_assert!(placed > last);
                // Whatever it passes by asked nothing, and neither does what is
                // acknowledged.
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
