//! Limits the scanner's share of a CPU.

use std::time::{Duration, Instant};

/// How long it works at a time, so that a small share means few wake-ups.
const WORK: Duration = Duration::from_millis(10);
/// The longest rest, however small the share is.
const REST_MAX: Duration = Duration::from_secs(10);

/// Decides, from the CPU time that was used, when to rest and for how long.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// CPU time and time at the beginning of the work after the last rest. None before the first
    /// call.
    began: Option<(Duration, Instant)>,
}

impl Pace {
    /// The rest that is due at `now`, after `cpu` was used in all, to keep to this share of one
    /// CPU: 0.05 is 5 %, 1 is all of it. CPU time that was not used because others had the CPU is
    /// not made up for later.
    pub(super) fn rest(&mut self, share: f64, cpu: Duration, now: Instant) -> Option<Duration> {
        let Some((cpu_before, began)) = self.began else {
            self.began = Some((cpu, now));
            return None;
        };
        let used = cpu.saturating_sub(cpu_before);
        let rest = rest_after(share, used, now.saturating_duration_since(began))?;
        self.began = Some((cpu, now + rest));
        (!rest.is_zero()).then_some(rest)
    }
}

/// The rest that is due after `used` CPU time within `passed`. None while that is too little for
/// a rest.
fn rest_after(share: f64, used: Duration, passed: Duration) -> Option<Duration> {
    if used < WORK {
        return None;
    }
    // NaN and values up to 0 count as the smallest share.
    let share = share.clamp(0.0, 1.0).max(0.0);
    let earned = Duration::try_from_secs_f64(used.as_secs_f64() / share).unwrap_or(Duration::MAX);
    Some(earned.saturating_sub(passed).min(REST_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_by_share() {
        let ms = Duration::from_millis;
        for (share, used, passed, rest) in [
            // Not worth a rest yet.
            (0.05, 9, 9, None),
            (0.05, 0, 1_000, None),
            // 10 ms are 5 % of 200.
            (0.05, 10, 10, Some(190)),
            (0.05, 10, 150, Some(50)),
            (0.05, 20, 30, Some(370)),
            // Others had the CPU for longer.
            (0.05, 10, 200, Some(0)),
            (0.05, 10, 5_000, Some(0)),
            (0.5, 10, 10, Some(10)),
            (1.0, 10, 10, Some(0)),
            (7.0, 10, 10, Some(0)),
            // A tiny share, none, and invalid ones.
            (1e-9, 10, 10, Some(10_000)),
            (0.0, 10, 10, Some(10_000)),
            (-1.0, 10, 10, Some(10_000)),
            (f64::NAN, 10, 10, Some(10_000)),
        ] {
            let decided = rest_after(share, ms(used), ms(passed));
            assert_eq!(decided, rest.map(ms), "{share} of {passed} ms, used {used}");
        }
    }

    #[test]
    fn over_time_the_share_is_kept() {
        let start = Instant::now();
        let (mut now, mut cpu) = (start, Duration::from_secs(3));
        let mut pace = Pace::default();
        // In the second half, others take most of the CPU.
        for turn in 0..20_000_u64 {
            let work = Duration::from_micros(300 + turn % 7 * 100);
            cpu += work;
            now += if turn < 10_000 { work } else { work * 30 };
            now += pace.rest(0.05, cpu, now).unwrap_or_default();
            if turn == 10_000 {
                let share = (cpu.as_secs_f64() - 3.0) / (now - start).as_secs_f64();
                assert!((0.049..0.051).contains(&share), "{share}");
            }
        }
        let share = (cpu.as_secs_f64() - 3.0) / (now - start).as_secs_f64();
        assert!((0.03..0.05).contains(&share), "{share}");
    }
}
