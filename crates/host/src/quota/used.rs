//! CPU time that threads have used.

use std::fs;
use std::time::Duration;

/// A thread, and the CPU time that it has used since it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The thread.
    pub thread: u32,
    /// Its CPU time.
    pub time: Duration,
}

/// CPU time of those threads of `pid` that still exist.
#[must_use]
pub fn used(pid: u32, threads: &[u32]) -> Vec<Used> {
    let of = |&thread: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).ok()?;
        Some(Used { thread, time: running(&text)? })
    };
    threads.iter().filter_map(of).collect()
}

/// The first of schedstat's three numbers: nanoseconds on a CPU.
fn running(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_busy_thread_grows() {
        let pid = std::process::id();
        let before = used(pid, &[pid, u32::MAX]);
        assert_eq!(before.len(), 1, "threads that are gone are left out");
        let mut sum = 0u64;
        let mut now = before.clone();
        // A test doesn't run on the main thread, so look at all threads.
        let all = || -> Vec<u32> {
            let names = fs::read_dir("/proc/self/task").unwrap();
            names.filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok()).collect()
        };
        let total = |list: &[Used]| list.iter().map(|used| used.time).sum::<Duration>();
        let begin = total(&used(pid, &all()));
        while total(&now) <= begin {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
            now = used(pid, &all());
        }
        assert_eq!(running("12 3 4"), Some(Duration::from_nanos(12)));
        assert_eq!(running(""), None);
    }
}
