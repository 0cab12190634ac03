//! Detects that a migration makes no progress at the floor.

use std::time::Duration;

/// Progress is a remainder that is smaller than ever before, by this share.
const GAIN: f64 = 0.1;
/// At the floor, both have to pass without progress: the remainder fluctuates with passes, and each
/// takes long on a slow link.
const SECONDS: f64 = 6.0;
const PASSES: u32 = 3;
/// Above the floor it may take this many times as long: there is still something to try, but not
/// forever.
const ABOVE_FLOOR: f64 = 5.0;

/// What to do if the floor isn't enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStall {
    /// Go on trying.
    Keep,
    /// Stop the VM and accept the longer downtime.
    Stop,
    /// Cancel the migration.
    Cancel,
}

/// The state of a migration that makes no progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// The dirty rate of the throttled guest.
    pub dirty_bytes_per_s: f64,
    /// The delivered rate.
    pub delivered_bytes_per_s: f64,
    /// The guest's share of CPU time.
    pub share: f64,
    /// The remainder.
    pub left_bytes: u64,
    /// The downtime if the VM stopped now.
    pub predicted_blackout: Duration,
}

/// Tracks progress while the VM is throttled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Patience {
    /// The smallest remainder, and when it was reached.
    best: Option<(f64, When)>,
    /// Since when the share is at the floor.
    floor: Option<When>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct When {
    at_s: f64,
    pass: u32,
}

impl When {
    fn is_past(self, since: Self, seconds: f64) -> bool {
        self.at_s - since.at_s >= seconds && self.pass.saturating_sub(since.pass) >= PASSES
    }
}

impl Patience {
    /// Starts anew.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// Notes the remainder at the end of a pass; returns whether patience has ended.
    pub(super) fn is_over(&mut self, left: f64, at_s: f64, pass: u32, floor: bool) -> bool {
        let now = When { at_s, pass };
        self.floor = floor.then(|| self.floor.unwrap_or(now));
        let (least, since) = *self.best.get_or_insert((left, now));
        if left < least * (1.0 - GAIN) {
            self.best = Some((left, now));
            return false;
        }
        let at_floor = self.floor.is_some_and(|floor| now.is_past(floor, SECONDS));
        now.is_past(since, if at_floor { SECONDS } else { SECONDS * ABOVE_FLOOR })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second in which patience has ended, with one pass per second.
    fn ends(left: impl Fn(u32) -> f64, floor: impl Fn(u32) -> bool) -> Option<u32> {
        let mut patience = Patience::default();
        (0..100).find(|at| patience.is_over(left(*at), f64::from(*at), *at, floor(*at)))
    }

    #[test]
    fn patience_lasts_as_long_as_there_is_progress() {
        assert_eq!(ends(|at| 100.0 * 0.88f64.powi(at.cast_signed()), |_| true), None);
        assert_eq!(ends(|_| 100.0, |_| true), Some(6));
        assert_eq!(ends(|_| 100.0, |_| false), Some(30));
        // A remainder above the smallest so far, or one that fluctuates, is no progress.
        assert_eq!(ends(|at| 100.0 + f64::from(at % 3), |_| true), Some(6));
        assert_eq!(ends(|at| if at < 4 { 100.0 } else { 50.0 }, |_| true), Some(10));
    }

    #[test]
    fn patience_counts_from_reaching_the_floor() {
        assert_eq!(ends(|_| 100.0, |at| at >= 8), Some(14));
        // A floor that is left now and then doesn't count, but the stall still ends.
        assert_eq!(ends(|_| 100.0, |at| at % 4 != 0), Some(30));
    }

    #[test]
    fn it_takes_passes_as_well_as_time() {
        let mut patience = Patience::default();
        let over = (0..100).find(|at| patience.is_over(1.0, f64::from(*at), at / 10, true));
        assert_eq!(over, Some(30));
    }
}
