//! When a writer with bursts writes, and when it rests.

use core::time::Duration;

/// Bursts and rests of the same length, one after the other, by any clock.
#[derive(Clone, Copy, Debug)]
pub struct Swing {
    half: Duration,
    since: Duration,
}

impl Swing {
    /// Begins with a burst. A zero length means one burst without an end.
    #[must_use]
    pub fn new(half: Duration, since: Duration) -> Self {
        Self { half, since }
    }

    /// Whether the writer rests.
    #[must_use]
    pub fn rests(&self, now: Duration) -> bool {
        let elapsed = now.saturating_sub(self.since).as_micros();
        let halves = elapsed.checked_div(self.half.as_micros());
        halves.is_some_and(|halves| !halves.is_multiple_of(2))
    }

    /// Begins again, with a burst.
    pub fn restart(&mut self, now: Duration) {
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_and_rests_alternate() {
        let start = Duration::from_secs(9);
        let at = |ms| start + Duration::from_millis(ms);
        let mut swing = Swing::new(Duration::from_millis(500), start);
        for (ms, rests) in [(0, false), (499, false), (500, true), (999, true), (1000, false)] {
            assert_eq!(swing.rests(at(ms)), rests, "{ms}");
        }
        swing.restart(at(600));
        assert!(!swing.rests(at(600)) && swing.rests(at(1100)));
        assert!(!Swing::new(Duration::ZERO, start).rests(at(7)));
    }
}
