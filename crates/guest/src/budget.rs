//! The budget of an answer, and what has been used of it.

use std::time::{Duration, Instant};

use cachemap::Budget;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Shorter rests are accumulated.
const REST_MIN: Duration = Duration::from_millis(2);
/// Parts of the time; see [`Meter::part`].
const PARTS: u32 = 8;

/// Tracks the share of a CPU and the time that may be used.
#[derive(Debug)]
pub(crate) struct Meter {
    budget: Budget,
    began: Instant,
    cpu_before: Duration,
}

impl Meter {
    /// Starts now.
    pub(crate) fn start(budget: Budget) -> Self {
        Self { budget, began: Instant::now(), cpu_before: cpu() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// CPU time that the calling thread has used.
    pub(crate) fn used(&self) -> Duration {
        cpu().saturating_sub(self.cpu_before)
    }

    /// The remaining time.
    pub(crate) fn left(&self) -> Duration {
        Duration::from_millis(self.budget.time_ms.into()).saturating_sub(self.elapsed())
    }

    /// The time after which what was found so far is examined, although there may be more: an answer
    /// that ends early is to have something.
    pub(crate) fn part(&self) -> Duration {
        Duration::from_millis(self.budget.time_ms.into()) / PARTS
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.budget.memory_bytes
    }

    /// How long to rest to stay within the share.
    pub(crate) fn rest(&self) -> Option<Duration> {
        let rest = rest(self.used(), self.elapsed(), self.budget.cpu_percent);
        (rest >= REST_MIN).then_some(rest)
    }
}

fn rest(used: Duration, elapsed: Duration, cpu_percent: u16) -> Duration {
    let due = used * 100 / u32::from(cpu_percent.max(1));
    due.saturating_sub(elapsed)
}

fn cpu() -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ThreadCPUTime);
    let secs = u64::try_from(tv_sec).unwrap_or(0);
    Duration::new(secs, u32::try_from(tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_keep_to_the_share() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(10), ms(10), 100), ms(0));
        assert_eq!(rest(ms(10), ms(10), 50), ms(10));
        assert_eq!(rest(ms(10), ms(15), 10), ms(85));
        assert_eq!(rest(ms(10), ms(1000), 1), ms(0));
        assert_eq!(rest(ms(10), ms(10), 0), ms(990));
    }

    #[test]
    fn what_was_used_is_measured() {
        let meter = Meter::start(Budget { cpu_percent: 1, time_ms: 60_000, ..Budget::default() });
        let mut sum = 0_u64;
        while meter.used() < Duration::from_millis(3) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(meter.rest().is_some_and(|rest| rest > Duration::from_millis(50)));
        assert!(meter.left() > Duration::from_secs(30));
    }
}
