//! A limit that a gang's leading thread requests for one of its moves.

use api::{BitRate, BoundsChange};
use parking_lot::Mutex;

/// The last request, and its answer.
#[derive(Debug, Default)]
pub(super) struct LimitOrder(Mutex<Option<Ordered>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ordered {
    /// Not answered yet.
    Due(BitRate),
    Answered(LimitAnswer),
}

/// The answer of the source's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitAnswer {
    Set(BitRate),
    /// It does not change this migration's limit, now or later.
    Refused,
}

impl LimitOrder {
    pub(super) fn request(&self, limit: BitRate) {
        *self.0.lock() = Some(Ordered::Due(limit));
    }

    /// The limit to order, until that is answered.
    pub(super) fn due(&self) -> Option<BitRate> {
        match *self.0.lock() {
            Some(Ordered::Due(limit)) => Some(limit),
            Some(Ordered::Answered(_)) | None => None,
        }
    }

    pub(super) fn answer(&self, answer: LimitAnswer) {
        *self.0.lock() = Some(Ordered::Answered(answer));
    }

    /// The answer, once.
    pub(super) fn take_answer(&self) -> Option<LimitAnswer> {
        let mut ordered = self.0.lock();
        let Some(Ordered::Answered(answer)) = *ordered else { return None };
        *ordered = None;
        Some(answer)
    }
}

/// The change that sets a limit.
pub(super) fn change(limit: BitRate) -> BoundsChange {
    BoundsChange { limit_bits_per_s: Some(Some(limit)), ..BoundsChange::default() }
}
