//! The loss of a guest that writes faster than the link: how far it was throttled, and what it did
//! not do meanwhile that it would have done.

use std::thread;
use std::time::{Duration, Instant};

use api::Sample;

use super::result::Run;
use crate::contender::{Contender, Moved};
use crate::count;
use lab::error::Result;
use lab::guest::Guest;

/// How long a guest that always writes is watched undisturbed.
const WATCH: Duration = Duration::from_secs(3);
/// Work that the migration leaves until after the VM runs is its effect, too.
const AFTER: Duration = Duration::from_millis(300);
/// A share of at least this counts as all.
const ALL: f64 = 0.999;

/// The work of an undisturbed guest, which repeats after a period.
pub(super) struct Undisturbed {
    counts: Vec<(Instant, u64)>,
    began: Instant,
    period: Duration,
}

impl Undisturbed {
    /// Watches a guest for a while: one that swings from the start of a burst to the start of the
    /// next.
    pub(super) fn watch(guest: &Guest) -> Result<Self> {
        let swing = Duration::from_millis(guest.spec.orders.swing_ms) * 2;
        let period = if swing.is_zero() { WATCH } else { swing };
        guest.forget_gap();
        // Wait for the beat that reports the work before.
        thread::sleep(AFTER);
        guest.ask("burst")?;
        let began = Instant::now();
        thread::sleep(period);
        // Wait for the beat that reports the work until then.
        thread::sleep(AFTER);
        Ok(Self { counts: guest.pages(began, began + period + AFTER), began, period })
    }

    /// Pages per second, rests included.
    pub(super) fn pages_per_s(&self) -> f64 {
        self.pages_until(self.period) / self.period.as_secs_f64()
    }

    /// Pages within `elapsed` from the start of a period.
    fn pages_until(&self, elapsed: Duration) -> f64 {
        let whole = count::between(&self.counts, self.began, self.began + self.period);
        let periods = elapsed.as_secs_f64() / self.period.as_secs_f64();
        let rest = self.period.mul_f64(periods.fract());
        periods.floor() * whole + count::between(&self.counts, self.began, self.began + rest)
    }

    /// Work that is missing between two instants, in seconds of undisturbed work; `burst` is when a
    /// period began.
    fn lost_s(&self, counts: &[(Instant, u64)], burst: Instant, from: Instant, to: Instant) -> f64 {
        let elapsed = |at: Instant| at.saturating_duration_since(burst);
        let expected = self.pages_until(elapsed(to)) - self.pages_until(elapsed(from));
        let missing = expected - count::between(counts, from, to);
        missing / self.pages_per_s().max(1.0)
    }
}

/// A guest that is about to move.
pub(super) struct Slowed {
    undisturbed: Undisturbed,
    burst: Instant,
}

impl Slowed {
    /// Makes the guest begin a burst now, so that it is the same for every contender.
    pub(super) fn begin(undisturbed: Undisturbed, guest: &Guest) -> Result<Self> {
        guest.ask("burst")?;
        Ok(Self { undisturbed, burst: Instant::now() })
    }

    /// Adds the guest's losses to a run.
    pub(super) fn judge(
        self,
        run: Run,
        guest: &Guest,
        moved: &Moved,
        contender: &dyn Contender,
    ) -> Run {
        let to = moved.ran + AFTER;
        thread::sleep((to + AFTER).saturating_duration_since(Instant::now()));
        let silences = guest.silences(moved.began);
        let counts = guest.pages(moved.began, to + AFTER);
        let samples = contender.report().map(|report| report.samples.as_slice());
        let samples = samples.unwrap_or_default();
        let lowest = samples.iter().map(|sample| sample.share).reduce(f64::min);
        Run {
            guest_gap_ms: silences.switchover.as_secs_f64() * 1e3,
            stall_ms: Some(silences.before.as_secs_f64() * 1e3),
            lost_s: Some(self.undisturbed.lost_s(&counts, self.burst, moved.began, to)),
            undisturbed_bytes_per_s: Some(
                self.undisturbed.pages_per_s() * lab_guest::PAGE_BYTES as f64,
            ),
            share_lowest: lowest,
            slowed_s: lowest.map(|_| slowed_s(samples)),
            ..run
        }
    }
}

/// How long the share was less than all.
fn slowed_s(samples: &[Sample]) -> f64 {
    let slow = samples.windows(2).filter(|pair| pair[0].share < ALL);
    slow.fold(0.0, |sum, pair| sum + (pair[1].at_s - pair[0].at_s).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttled_seconds_are_added_up() {
        let sample = |(at_s, share)| Sample { at_s, share, ..Sample::default() };
        let samples = [(0.0, 1.0), (1.0, 0.5), (1.5, 0.4), (2.0, 1.0), (9.0, 0.9)].map(sample);
        assert!((slowed_s(&samples) - 1.0).abs() < 1e-9);
        assert_eq!(slowed_s(&[]), 0.0);
    }

    #[test]
    fn work_of_a_guest_that_swings_is_missed_only_in_its_bursts() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        // 100 pages in the first of every two seconds.
        let counts = vec![(at(0), 0), (at(1000), 100), (at(2000), 100)];
        let period = Duration::from_secs(2);
        let undisturbed = Undisturbed { counts, began: start, period };
        assert!((undisturbed.pages_per_s() - 50.0).abs() < 1e-6);
        let burst = at(10_000);
        let ms = |ms: u64| at(10_000 + ms);
        let nothing = [(ms(0), 500), (ms(9000), 500)];
        let lost = |from, to| undisturbed.lost_s(&nothing, burst, ms(from), ms(to));
        for (from, to, pages) in [(0, 2000, 100.0), (1000, 2000, 0.0), (1500, 4500, 150.0)] {
            assert!((lost(from, to) - pages / 50.0).abs() < 1e-6, "{from} to {to}");
        }
    }
}
