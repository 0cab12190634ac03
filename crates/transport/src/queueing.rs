//! How long a thread was runnable without a CPU.
//!
//! A lane that is blocked on its socket may wait for a slow network, a slow destination,
//! or a CPU. Only the wait for a CPU can be measured, and only by the kernel.

use std::fs;
use std::num::NonZeroU32;
use std::time::Duration;

/// The time that this thread has waited for a CPU so far. None if the thread has ended,
/// or the kernel doesn't count it.
pub(crate) fn of(thread: NonZeroU32) -> Option<Duration> {
    parse(&fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?)
}

/// The kernel reports nanoseconds on a CPU, nanoseconds in a run queue, and time slices.
fn parse(schedstat: &str) -> Option<Duration> {
    let mut numbers = schedstat.split_whitespace();
    let nanoseconds = numbers.nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_second_number_is_the_wait() {
        assert_eq!(parse("90901 1500000 1\n"), Some(Duration::from_micros(1500)));
        for odd in ["", "1", "1 x 2", "1 -2 3", "1 99999999999999999999 3"] {
            assert_eq!(parse(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn threads_that_share_one_cpu_wait_for_it() {
        use std::sync::Barrier;

        use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};

        let all = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
        let both = Barrier::new(2);
        let spin = || {
            sched_setaffinity(None, &one).unwrap();
            both.wait();
            // Each thread needs this much of the same CPU.
            while crate::thread_cpu() < Duration::from_millis(50) {}
            let thread = u32::try_from(gettid().as_raw_nonzero().get()).unwrap();
            of(NonZeroU32::new(thread).unwrap()).unwrap()
        };
        let waited: Duration = std::thread::scope(|scope| {
            let threads = [scope.spawn(spin), scope.spawn(spin)];
            threads.map(|thread| thread.join().unwrap()).into_iter().sum()
        });
        assert!(!waited.is_zero());
        let nobody = NonZeroU32::new(u32::try_from(i32::MAX).unwrap()).unwrap();
        assert_eq!(of(nobody), None);
    }
}
