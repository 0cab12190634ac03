//! Whether the machine has CPU time that nobody uses.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is looked at: the time since the last look, which is no shorter. What was begun
/// then shows by now.
const OVER: Duration = Duration::from_secs(3);
/// The share of all CPU time that must have been left for one more job.
const ROOM: f64 = 0.3;

/// Remembers what was used so far.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<Option<(Instant, Used)>>);

/// CPU time since the machine started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Used {
    all: u64,
    idle: u64,
}

impl Idle {
    /// Says yes once, and then not before what follows from it can be seen.
    pub(crate) fn has_room(&self) -> bool {
        let Some(now) = fs::read_to_string("/proc/stat").ok().and_then(|text| Used::parse(&text))
        else {
            return false;
        };
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((at, _)) if at.elapsed() < OVER => false,
            Some((_, before)) => {
                *last = Some((Instant::now(), now));
                before.idle_until(now) >= ROOM
            }
            None => {
                *last = Some((Instant::now(), now));
                false
            }
        }
    }
}

impl Used {
    fn parse(stat: &str) -> Option<Self> {
        let numbers = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> =
            numbers.split_whitespace().map_while(|number| number.parse().ok()).collect();
        // user, nice, system, idle, waiting for a disk, and more; what guests use is
        // in the first two. What is nice leaves the CPU to whoever wants it.
        let idle = [1, 3, 4].iter().map(|at| ticks.get(*at)).sum::<Option<u64>>()?;
        Some(Self { all: ticks.iter().take(8).sum(), idle })
    }

    #[allow(clippy::cast_precision_loss, reason = "a share is wanted")]
    fn idle_until(self, later: Self) -> f64 {
        let all = later.all.saturating_sub(self.all).max(1);
        later.idle.saturating_sub(self.idle) as f64 / all as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_nobody_used_is_told_from_the_kernels_words() {
        let before = Used::parse("cpu  100 7 50 793 50 0 0 0 0 0\ncpu0 1 2 3 4 5\n").unwrap();
        assert_eq!(before, Used { all: 1000, idle: 850 });
        let later = Used::parse("cpu  160 10 60 810 60 0 0 0 7 0\n").unwrap();
        assert_eq!(before.idle_until(later), 0.3);
        assert_eq!(before.idle_until(before), 0.0);
        assert_eq!(Used::parse("cpu0 1 2 3 4 5 6 7 8"), None);
        assert_eq!(Used::parse("cpu  1 2"), None);
    }

    #[test]
    fn there_is_no_room_before_a_second_look() {
        let idle = Idle::default();
        assert!(!idle.has_room());
        assert!(!idle.has_room());
    }
}
