//! Detects whether a guest works in waves, and predicts the next trough.
//!
//! A guest that works hard for some seconds and then rests is best switched over while it rests,
//! without throttling. Its activity is derived from its CPU use, known from the beginning of the
//! first pass on, and from its dirty rate, known only later.

/// The peak decays over this time, and the signal is smoothed over this one.
const PEAK_S: f64 = 30.0;
const SMOOTH_S: f64 = 0.3;
/// A guest is at rest below this share of the peak, and at work above that one.
const REST: f64 = 0.3;
const WORK: f64 = 0.5;
/// After this much work, the last rest is too long ago to count on another.
const FORGOTTEN_S: f64 = 30.0;
/// Shorter rests are too short for a switchover.
const REST_LEAST_S: f64 = 0.5;
/// A trough of which less than this share is left counts as over.
const NEARLY_OVER: f64 = 0.2;
/// A phase that lasts this much longer than the previous one breaks the pattern.
const OVERDUE: f64 = 1.5;
const OVERDUE_S: f64 = 1.0;

/// An expected trough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trough {
    /// Seconds until it starts; 0 if it has started.
    pub(super) within_s: f64,
    /// How long it is expected to last.
    pub(super) lasts_s: f64,
}

/// The wave of one signal: CPU use, or the dirty rate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Wave {
    smooth: Option<f64>,
    peak: f64,
    at_rest: bool,
    since_s: f64,
    work_s: Option<f64>,
    rest_s: Option<f64>,
}

impl Wave {
    /// Notes the signal's value, `elapsed_s` after the previous one.
    pub(super) fn note(&mut self, at_s: f64, value: f64, elapsed_s: f64) {
        let weight = 1.0 - (-elapsed_s / SMOOTH_S).exp();
        let before = *self.smooth.get_or_insert(value);
        let smooth = before + (value - before) * weight;
        self.smooth = Some(smooth);
        self.peak = smooth.max(self.peak * (-elapsed_s / PEAK_S).exp());
        let rests = smooth < self.peak * if self.at_rest { WORK } else { REST };
        if rests == self.at_rest {
            return;
        }
        let lasted = Some(at_s - self.since_s);
        if self.at_rest {
            self.rest_s = lasted;
        } else {
            self.work_s = lasted;
        }
        (self.at_rest, self.since_s) = (rests, at_s);
    }

    /// The next trough, if there is a pattern and it still holds.
    pub(super) fn trough(&self, at_s: f64) -> Option<Trough> {
        let lasted_s = at_s - self.since_s;
        let work_s = self.work_s?;
        if self.at_rest {
            let lasts_s = self.rest_s.unwrap_or(lasted_s).max(lasted_s);
            let left_s = lasts_s - lasted_s;
            // Near a trough's end, or in the first one, the next one is returned: what is known
            // about the guest is a little old.
            return Some(if left_s > lasts_s * NEARLY_OVER {
                Trough { within_s: 0.0, lasts_s: left_s }
            } else {
                Trough { within_s: left_s + work_s, lasts_s }
            })
            .filter(|trough| trough.lasts_s >= REST_LEAST_S);
        }
        let lasts_s = self.rest_s.filter(|rest| *rest >= REST_LEAST_S)?;
        let due = lasted_s <= work_s * OVERDUE + OVERDUE_S && lasted_s <= FORGOTTEN_S;
        due.then(|| Trough { within_s: (work_s - lasted_s).max(0.0), lasts_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The trough expected after `seconds` of this activity.
    fn after(seconds: f64, activity: impl Fn(f64) -> f64) -> Option<Trough> {
        let mut wave = Wave::default();
        let mut at_s = 0.0;
        while at_s < seconds {
            at_s += 0.05;
            wave.note(at_s, activity(at_s), 0.05);
        }
        wave.trough(at_s)
    }

    /// 5 s of work, 5 s of rest.
    fn swing(at_s: f64) -> f64 {
        if at_s % 10.0 < 5.0 { 1.0 } else { 0.05 }
    }

    #[test]
    fn a_trough_is_foreseen_once_one_was_seen() {
        assert_eq!(after(4.0, swing), None);
        let now = after(7.0, swing).unwrap();
        // In the first rest, its duration isn't known.
        assert!(now.lasts_s >= REST_LEAST_S, "{now:?}");
        for (at_s, within_s) in [(11.0, 4.0), (13.0, 2.0), (14.5, 0.5), (32.0, 3.0)] {
            let trough = after(at_s, swing).unwrap();
            assert!((trough.within_s - within_s).abs() < 0.6, "{at_s}: {trough:?}");
            assert!((trough.lasts_s - 5.0).abs() < 0.6, "{at_s}: {trough:?}");
        }
        let resting = after(17.0, swing).unwrap();
        assert!(resting.within_s == 0.0 && (resting.lasts_s - 3.0).abs() < 0.6, "{resting:?}");
    }

    #[test]
    fn no_pattern_no_trough() {
        assert_eq!(after(60.0, |_| 1.0), None);
        // Noise and short dips aren't rest.
        assert_eq!(after(60.0, |at_s| 0.8 + 0.2 * (at_s * 37.0).sin()), None);
        assert_eq!(after(60.05, |at_s| if at_s % 5.0 < 0.2 { 0.0 } else { 1.0 }), None);
        // The guest went on working when its rest was due.
        assert_eq!(after(30.0, |at_s| if at_s < 10.0 { swing(at_s) } else { 1.0 }), None);
    }
}
