//! The writer: rewrites pages of the working set at a given rate, evenly, and
//! counts what it did.

use std::time::Duration;

use crate::PAGE_BYTES;
use crate::memory::Area;
use crate::orders::Order;
use crate::random::Random;

/// Work that a stalled writer makes up for; what is older is lost. So the
/// rate that it achieved tells what share of its time the guest really had.
const DEBT_MAX: Duration = Duration::from_millis(20);

/// A writer sleeps no shorter, so that it is evenly at work, and no longer.
const STEP_MIN: Duration = Duration::from_millis(1);
const STEP_MAX: Duration = Duration::from_millis(10);

/// Turns passing time into pages to write.
#[derive(Debug, Default)]
pub struct Pacer {
    rate: u64,
    step_min: Duration,
    due_bytes: f64,
}

impl Pacer {
    /// One that has its writer sleep no shorter than this.
    #[must_use]
    pub fn with_step(step_min: Duration) -> Self {
        Self { step_min, ..Self::default() }
    }

    /// Sets the rate, in bytes per second.
    pub fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
        self.due_bytes = 0.0;
    }

    /// The rate, in bytes per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// How long to sleep until a page may be due. A guest under TCG takes a tenth of
    /// a core to wake up a thousand times a second for nothing.
    #[must_use]
    pub fn step(&self) -> Duration {
        let page = Duration::from_secs(PAGE_BYTES as u64)
            .checked_div(u32::try_from(self.rate).unwrap_or(u32::MAX));
        page.unwrap_or(STEP_MAX).clamp(self.step_min.clamp(STEP_MIN, STEP_MAX), STEP_MAX)
    }

    /// Pages to write, `elapsed` after the last call.
    pub fn pages_due(&mut self, elapsed: Duration) -> usize {
        let elapsed = elapsed.min(DEBT_MAX);
        self.due_bytes += self.rate as f64 * elapsed.as_secs_f64();
        let pages = (self.due_bytes / PAGE_BYTES as f64).floor();
        self.due_bytes -= pages * PAGE_BYTES as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "floor of a positive number"
        )]
        let pages = pages as usize;
        pages
    }
}

/// Rewrites pages of an area.
pub struct Writer {
    area: Area,
    order: Order,
    random: Random,
    next: usize,
    written: u64,
    wrong: u64,
    first_wrong: Option<String>,
}

impl Writer {
    /// A writer for `area`.
    #[must_use]
    pub fn new(area: Area, order: Order, seed: u64) -> Self {
        let random = Random::new(seed, u64::MAX);
        Self { area, order, random, next: 0, written: 0, wrong: 0, first_wrong: None }
    }

    /// Rewrites `count` pages.
    pub fn write(&mut self, count: usize) {
        let pages = self.area.count();
        if pages == 0 {
            return;
        }
        for _ in 0..count {
            let index = match self.order {
                Order::Random => self.random.below(pages),
                Order::Sequential => self.next,
            };
            self.next = (index + 1) % pages;
            if let Some(wrong) = self.area.rewrite(index) {
                self.wrong += 1;
                self.first_wrong.get_or_insert(wrong);
            }
        }
        self.written += count as u64;
    }

    /// Pages written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The area.
    #[must_use]
    pub fn area(&self) -> &Area {
        &self.area
    }

    /// Pages that were wrong when they were to be rewritten, and the first.
    #[must_use]
    pub fn wrong(&self) -> (u64, Option<&str>) {
        (self.wrong, self.first_wrong.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Kind;

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
        for (rate, step_ms) in [(0, 10), (100_000, 10), (1_024_000, 4), (60_000_000, 1)] {
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
    }

    #[test]
    fn both_orders_stay_inside_and_right() {
        for order in [Order::Random, Order::Sequential] {
            let area = Area::fill("ws", Kind::Random, 1, 0, 5 * PAGE_BYTES as u64, true);
            let mut writer = Writer::new(area, order, 9);
            writer.write(23);
            assert_eq!(writer.written(), 23);
            assert_eq!(writer.wrong(), (0, None));
            assert_eq!(writer.area().check().wrong, 0);
        }
    }

    #[test]
    fn nothing_to_write_is_fine() {
        let area = Area::fill("ws", Kind::Random, 1, 0, 0, true);
        let mut writer = Writer::new(area, Order::Random, 9);
        writer.write(10);
        assert_eq!(writer.written(), 0);
    }
}
