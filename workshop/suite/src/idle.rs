//! Whether the machine has idle CPU time.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two samples. A job that was started after one shows in the next.
const OVER: Duration = Duration::from_secs(3);
/// Share of all CPU time that must have been idle before one more job starts.
const ROOM: f64 = 0.3;

/// The last sample.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<Option<(Instant, Used)>>);

/// CPU time since the machine started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Used {
    all: u64,
    idle: u64,
}

impl Idle {
    /// True at most once per sample, so that the effect of the job that follows is measured first.
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
        // user, nice, system, idle, iowait, and more; guest time is in the first two. Nice time
        // counts as idle, since it yields to any other process.
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
    fn idle_time_is_parsed_from_proc_stat() {
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
