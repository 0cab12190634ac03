//! xl's passes, as epochs show them: each is one, and few passes without a page in common are one.

use std::time::{Duration, Instant};

use page::{Batch, PAGE_BYTES};
use parking_lot::Mutex;

/// Counts passes; called by the tap.
#[derive(Debug, Default)]
pub(super) struct XlPasses(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    pass: u32,
    /// None before the first.
    began: Option<Instant>,
    /// Bytes of bodies in this pass.
    bytes: u64,
    /// How long the one before it took.
    before: Option<Duration>,
    dirty_bytes_per_s: f64,
    is_verified: bool,
}

/// What was seen so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seen {
    /// The current pass; the first is 1.
    pub(super) pass: u32,
    /// What the guest dirtied in the last pass but one, per second; 0 if that is not known.
    pub(super) dirty_bytes_per_s: f64,
    /// Whether xl has sent all pages once more after the last pass.
    pub(super) is_verified: bool,
}

impl XlPasses {
    pub(super) fn took(&self, batch: &Batch) {
        self.took_at(batch, Instant::now());
    }

    fn took_at(&self, batch: &Batch, now: Instant) {
        let state = &mut *self.0.lock();
        if state.is_verified {
            return;
        }
        if batch.epoch.0 > state.pass {
            // What a pass sends was dirtied during the one before it.
            if let Some(before) = state.before.filter(|before| !before.is_zero()) {
                state.dirty_bytes_per_s = state.bytes as f64 / before.as_secs_f64();
            }
            state.before = state.began.map(|began| now.saturating_duration_since(began));
            (state.pass, state.began, state.bytes) = (batch.epoch.0, Some(now), 0);
        }
        state.bytes += (batch.bodies().len() * PAGE_BYTES) as u64;
    }

    /// The pages from now on are those that xl's receiver compares (`xl migrate --debug`). That is
    /// no pass: the domain is suspended, and none of them is new.
    pub(super) fn verifies(&self) {
        self.0.lock().is_verified = true;
    }

    pub(super) fn seen(&self) -> Seen {
        let State { pass, dirty_bytes_per_s, is_verified, .. } = *self.0.lock();
        Seen { pass, dirty_bytes_per_s, is_verified }
    }

    /// When xl has suspended the domain, whose last page was sent by now: at the start of its last
    /// pass, which nothing marks. If all pages come in one pass, that is not known.
    pub(super) fn suspended_at(&self) -> Option<Instant> {
        let State { pass, began, .. } = *self.0.lock();
        began.filter(|_| pass > 1)
    }
}

#[cfg(test)]
mod tests {
    use page::{Epoch, PageIndex, Pool};

    use super::*;

    #[test]
    fn an_epoch_is_a_pass_whose_pages_were_dirtied_in_the_one_before() {
        let (passes, pool, start) = (XlPasses::default(), Pool::new(1 << 20), Instant::now());
        let took = |epoch, pages: u32, at_s| {
            let mut batch = pool.take().unwrap();
            batch.epoch = Epoch(epoch);
            (0..pages).for_each(|nth| batch.push_body(PageIndex(nth), nth as usize * PAGE_BYTES));
            passes.took_at(&batch, start + Duration::from_secs(at_s));
            let Seen { pass, dirty_bytes_per_s, .. } = passes.seen();
            (pass, dirty_bytes_per_s / PAGE_BYTES as f64)
        };
        assert_eq!(took(1, 100, 0), (1, 0.0));
        assert_eq!(passes.suspended_at(), None);
        assert_eq!(took(1, 100, 5), (1, 0.0));
        assert_eq!(took(2, 30, 10), (2, 0.0));
        assert_eq!(took(2, 20, 11), (2, 0.0));
        // 50 pages in the 10 seconds of the first.
        assert_eq!(took(3, 1, 12), (3, 5.0));
        assert_eq!(passes.suspended_at(), Some(start + Duration::from_secs(12)));
        // What is compared is neither a pass nor dirty, and began after the suspend.
        assert!(!passes.seen().is_verified);
        passes.verifies();
        assert_eq!(took(4, 100, 20), (3, 5.0));
        assert_eq!(passes.suspended_at(), Some(start + Duration::from_secs(12)));
        assert!(passes.seen().is_verified);
    }
}
