//! A limit that a gang's leading thread requests for one of its moves.

use api::{BitRate, BoundsChange};
use parking_lot::Mutex;

/// The last request, and its answer.
#[derive(Debug, Default)]
pub(super) struct LimitOrder(Mutex<Option<Ordered>>);

#[derive(Clone, Copy, Debug)]
struct Ordered {
    limit: BitRate,
    answer: Option<LimitAnswer>,
    was_lost: bool,
}

/// The answer of the source's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitAnswer {
    Set,
    /// It does not change this migration's limit, now or later.
    Refused,
}

/// An answer that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answered {
    pub(super) answer: LimitAnswer,
    /// An answer before it was lost, so the same order may be carried out once more, later.
    pub(super) was_lost: bool,
}

impl LimitOrder {
    pub(super) fn request(&self, limit: BitRate) {
        *self.0.lock() = Some(Ordered { limit, answer: None, was_lost: false });
    }

    /// The limit to order, until that is answered.
    pub(super) fn due(&self) -> Option<BitRate> {
        self.0.lock().filter(|ordered| ordered.answer.is_none()).map(|ordered| ordered.limit)
    }

    /// The order may have been carried out or not.
    pub(super) fn lose(&self) {
        if let Some(ordered) = &mut *self.0.lock() {
            ordered.was_lost = true;
        }
    }

    pub(super) fn answer(&self, answer: LimitAnswer) {
        if let Some(ordered) = &mut *self.0.lock() {
            ordered.answer = Some(answer);
        }
    }

    /// The answer, once.
    pub(super) fn take_answer(&self) -> Option<Answered> {
        let mut ordered = self.0.lock();
        let Ordered { answer, was_lost, .. } = (*ordered)?;
        let answer = answer?;
        *ordered = None;
        Some(Answered { answer, was_lost })
    }
}

/// The change that sets a limit.
pub(super) fn change(limit: BitRate) -> BoundsChange {
    BoundsChange { limit_bits_per_s: Some(Some(limit)), ..BoundsChange::default() }
}
