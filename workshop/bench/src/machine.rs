//! What the CPUs of the whole machine did.

use std::fs;

use lab::error::{LabError, Result, SystemContext};

/// Core seconds since the machine started.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CpuTime {
    /// Of all that runs here: not idle, I/O wait or steal.
    pub(super) busy_s: f64,
    /// Steal: something was ready to run here, and the hypervisor ran something else.
    pub(super) stolen_s: f64,
}

impl CpuTime {
    /// Reads `/proc/stat`.
    ///
    /// # Errors
    /// If it can't be read, or is not what Linux writes.
    pub(super) fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").doing("read what CPUs did")?;
        let ticks_per_s = rustix::param::clock_ticks_per_second() as f64;
        Self::parse(&text, ticks_per_s).ok_or(LabError::Text { what: "what CPUs did", text })
    }

    fn parse(stat: &str, ticks_per_s: f64) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let numbers = line.split_whitespace().map(str::parse);
        let numbers: Vec<u64> = numbers.collect::<std::result::Result<_, _>>().ok()?;
        let [user, nice, system, _idle, _wait, interrupts, soft, stolen, ..] = numbers[..] else {
            return None;
        };
        let seconds = |ticks: u64| ticks as f64 / ticks_per_s;
        let busy_s = seconds(user + nice + system + interrupts + soft);
        Some(Self { busy_s, stolen_s: seconds(stolen) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_busy_and_what_is_stolen_is_apart() {
        let text = "cpu  10 20 30 400 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        let read = CpuTime { busy_s: 0.73, stolen_s: 0.08 };
        assert_eq!(CpuTime::parse(text, 100.0), Some(read));
        assert_eq!(CpuTime::parse("intr 3", 100.0), None);
        assert!(CpuTime::now().unwrap().busy_s > 0.0);
    }
}
