//! How much CPU time a thread has used.

use std::fs;
use std::time::Duration;

/// A thread, and what it has used since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The thread.
    pub thread: u32,
    /// CPU time.
    pub time: Duration,
}

/// What the threads of `pid` have used that still live.
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
    fn a_thread_that_works_is_seen_to() {
        let pid = std::process::id();
        let before = used(pid, &[pid, u32::MAX]);
        assert_eq!(before.len(), 1, "threads that are gone are left out");
        let mut sum = 0u64;
        let mut now = before.clone();
        // The thread that runs a test is not the main one: so any of them.
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
