//! How long a thread ran, and how long it was runnable without a CPU.
//!
//! A lane that is blocked on its socket may wait for a slow network, a slow destination,
//! or a CPU. Only the wait for a CPU can be measured, and only by the kernel.

use std::fs;
use std::num::NonZeroU32;
use std::time::Duration;

use policy::yielding::CpuTime;

/// The CPU time of a thread of this process so far. None if the thread has ended, or the kernel
/// doesn't count it.
#[must_use]
pub fn cpu_time(thread: NonZeroU32) -> Option<CpuTime> {
    parse(&fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?)
}

/// The kernel reports nanoseconds on a CPU, nanoseconds in a run queue, and time slices.
fn parse(schedstat: &str) -> Option<CpuTime> {
    let mut numbers = schedstat.split_whitespace();
    let mut next = || Some(Duration::from_nanos(numbers.next()?.parse().ok()?));
    Some(CpuTime { ran: next()?, waited: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_first_two_numbers_are_run_and_wait() {
        let (ran, waited) = (Duration::from_nanos(90_901), Duration::from_micros(1500));
        assert_eq!(parse("90901 1500000 1\n"), Some(CpuTime { ran, waited }));
        for odd in ["", "1", "x 1 2", "1 x 2", "1 -2 3", "1 99999999999999999999 3"] {
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
            let thread = gettid().as_raw_nonzero().get().unsigned_abs();
            let time = || cpu_time(NonZeroU32::new(thread).unwrap()).unwrap();
            // Each thread needs this much of the same CPU.
            while time().ran < Duration::from_millis(50) {}
            time().waited
        };
        let waited: Duration = std::thread::scope(|scope| {
            let threads = [scope.spawn(spin), scope.spawn(spin)];
            threads.map(|thread| thread.join().unwrap()).into_iter().sum()
        });
        assert!(!waited.is_zero());
        let nobody = NonZeroU32::new(u32::try_from(i32::MAX).unwrap()).unwrap();
        assert_eq!(cpu_time(nobody), None);
    }
}
