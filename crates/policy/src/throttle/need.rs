//! How much bandwidth a VM needs that would have to be throttled, or would arrive late.
//!
//! Lanes may take it from other traffic, as far as the operator permits (`pace`). So a VM that has
//! to be throttled is first given the time in which that shows.

use super::view::{COUNTED_ON, View};

/// A single look may be wrong: a VM must be short of bandwidth, or late, for this long.
const SHORT_S: f64 = 1.0;
/// The part of the boundary that is aimed at: at the boundary itself, noise would throttle the VM.
pub(super) const AIM: f64 = 0.8;
/// A rate that is needed no longer is kept for this long: others should not be disturbed, and the
/// VM not throttled, by each of its bursts.
const KEEP_S: f64 = 3.0;
/// The time after a change of the lanes' paces until the delivered rate shows it.
const SETTLE_S: f64 = 1.5;
/// The VM waits for more bandwidth for this long in all. Paces change once a second.
const WAIT_S: f64 = 5.0;

/// What a VM needs of the network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Need {
    /// Since when it seems to need more than is delivered.
    short_since: Option<f64>,
    /// Whether it has needed more.
    is_known: bool,
    /// The rate that it needs, and when it needed that last.
    kept: Option<(f64, f64)>,
    /// When lanes could last be given more.
    wider_s: Option<f64>,
    /// How long throttling was put off.
    waited_s: f64,
}

impl Need {
    /// Notes a sample. `waited_s`: time since the last one, if throttling was put off meanwhile.
    pub(super) fn note(&mut self, view: &View, waited_s: f64) {
        self.waited_s += waited_s;
        if view.wider {
            self.wider_s = Some(view.at_s);
        }
    }

    /// Detects the need of a VM that is not to be throttled, now or at all.
    pub(super) fn find(&mut self, view: &View, dirty: f64) {
        let is_short = view.missing() > 0.0 && required(view, dirty, 1.0) > view.rate;
        self.short_since = is_short.then(|| self.short_since.unwrap_or(view.at_s));
        self.is_known |= self.short_since.is_some_and(|since| view.at_s - since >= SHORT_S);
    }

    /// Whether a VM that has to be throttled may get enough bandwidth soon. It is known from now on
    /// that it needs more.
    pub(super) fn is_awaited(&mut self, view: &View) -> bool {
        self.is_known = true;
        self.waited_s < WAIT_S && self.is_changing(view)
    }

    /// For how long a deadline must seem to be missed.
    pub(super) fn late_s(&self, view: &View) -> f64 {
        if self.is_changing(view) { WAIT_S } else { SHORT_S }
    }

    /// Whether more may soon be delivered than now.
    fn is_changing(&self, view: &View) -> bool {
        self.wider_s.is_some_and(|last| view.at_s - last < SETTLE_S)
    }

    /// Guest bytes per second that the VM needs. None if it never needed more than it got.
    pub(super) fn rate(&mut self, view: &View, dirty: f64) -> Option<f64> {
        if !self.is_known {
            return None;
        }
        let now = required(view, dirty, AIM);
        let kept = self.kept.filter(|(rate, at_s)| now < *rate && view.at_s - at_s < KEEP_S);
        let (rate, _) = *self.kept.insert(kept.unwrap_or((now, view.at_s)));
        Some(rate)
    }
}

/// The rate at which the VM dirties this `part` of the boundary, and arrives in time.
fn required(view: &View, dirty: f64, part: f64) -> f64 {
    let converging = if view.first_pass_over { dirty / (view.boundary * part) } else { 0.0 };
    let time = view.time.filter(|_| view.missing() > 0.0);
    let in_time = time.map_or(0.0, |time| dirty + view.missing() / (time * COUNTED_ON).max(1e-3));
    converging.max(in_time)
}
