//! How a writer keeps to its rate, evenly.

use core::time::Duration;

use crate::PAGE_BYTES;

/// Time that a stalled writer catches up on, if its sleeps are shorter than half of that; older work
/// is dropped. So the achieved rate shows what share of its time the guest really had.
const DEBT_MAX: Duration = Duration::from_millis(20);

/// Shortest sleep of a writer, and the longest, after which it notices another rate.
const STEP_MIN: Duration = Duration::from_millis(1);
const STEP_MAX: Duration = Duration::from_millis(50);

/// One page in the unit of a rate times a time: bytes per second times nanoseconds.
const PAGE: u128 = PAGE_BYTES as u128 * 1_000_000_000;

/// Turns passing time into pages to write.
#[derive(Debug, Default)]
pub struct Pacer {
    rate: u64,
    step_min: Duration,
    /// Due work of less than a page.
    due: u128,
}

impl Pacer {
    /// A pacer whose writer sleeps at least this long.
    #[must_use]
    pub fn with_step(step_min: Duration) -> Self {
        Self { step_min, ..Self::default() }
    }

    /// Sets the rate, in bytes per second.
    pub fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
        self.due = 0;
    }

    /// The rate, in bytes per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// How long to sleep until a page may be due. A guest under TCG would use a tenth of a core to
    /// wake up a thousand times a second for nothing.
    #[must_use]
    pub fn step(&self) -> Duration {
        let page = Duration::from_secs(PAGE_BYTES as u64)
            .checked_div(u32::try_from(self.rate).unwrap_or(u32::MAX));
        page.unwrap_or(STEP_MAX).clamp(self.step_min.clamp(STEP_MIN, STEP_MAX), STEP_MAX)
    }

    /// Pages to write, `elapsed` after the last call.
    pub fn pages_due(&mut self, elapsed: Duration) -> usize {
        let debt_max = DEBT_MAX.max(self.step() * 2);
        self.due += u128::from(self.rate) * elapsed.min(debt_max).as_nanos();
        let pages = self.due / PAGE;
        self.due %= PAGE;
        usize::try_from(pages).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_is_kept_over_uneven_steps() {
        let mut pacer = Pacer::default();
        pacer.set_rate(1000 * PAGE_BYTES as u64);
        let steps = [1, 3, 1, 1, 7, 2].iter().cycle().take(600);
        let (mut pages, mut elapsed_ms) = (0, 0);
        for &step in steps {
            pages += pacer.pages_due(Duration::from_millis(step));
            elapsed_ms += step;
        }
        assert!(pages.abs_diff(usize::try_from(elapsed_ms).unwrap()) <= 1, "{pages} {elapsed_ms}");
    }

    #[test]
    fn a_slow_writer_sleeps_longer() {
        let mut pacer = Pacer::default();
        for (rate, step_ms) in
            [(0, 50), (50_000, 50), (204_800, 20), (1_024_000, 4), (60_000_000, 1)]
        {
            pacer.set_rate(rate);
            assert_eq!(pacer.step(), Duration::from_millis(step_ms), "{rate}");
        }
        let mut coarse = Pacer::with_step(Duration::from_millis(7));
        coarse.set_rate(60_000_000);
        assert_eq!(coarse.step(), Duration::from_millis(7));
        pacer.set_rate(1_024_000);
        let pages: usize = (0..100).map(|_| pacer.pages_due(pacer.step())).sum();
        assert_eq!(pages, 100);
    }

    #[test]
    fn a_stall_is_not_made_up_for() {
        let mut pacer = Pacer::default();
        pacer.set_rate(1000 * PAGE_BYTES as u64);
        assert_eq!(pacer.pages_due(Duration::from_secs(10)), 20);
        pacer = Pacer::with_step(Duration::from_millis(40));
        pacer.set_rate(1000 * PAGE_BYTES as u64);
        assert_eq!(pacer.pages_due(pacer.step()), 40);
        assert_eq!(pacer.pages_due(Duration::from_secs(10)), 80);
    }
}
