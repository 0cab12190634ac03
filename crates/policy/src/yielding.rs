//! Decides when data threads may run on idle CPUs only, and how many lanes a limit needs then.
//!
//! On a host without an idle CPU such threads get next to nothing, and a migration would not end.
//! So what they get is compared with a share of what they need, the floor. What is missing is made
//! up for among other threads.

use std::time::Duration;

/// Threads that need less in a second wait for the network, and wake up for moments.
const NEEDED_MIN: Duration = Duration::from_millis(10);
/// At most the missing part of so many seconds is made up for: what lacked a CPU for a minute must
/// not take one for a minute.
const OWED_S_MAX: f64 = 4.0;
/// What was got among other threads beyond the floor counts for so many seconds afterwards. More
/// would let a low floor stop a lane for as long as a dead connection.
const AHEAD_S_MAX: f64 = 2.0;
/// What one lane carries, even if a tenth is left of what it compresses: a core compresses 300 MB
/// per second and more.
const LANE_BITS_PER_S: u64 = 250_000_000;

/// CPU time of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// On a CPU.
    pub ran: Duration,
    /// Runnable, without a CPU.
    pub waited: Duration,
}

/// How threads compete for CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// As all others, by nice values.
    #[default]
    Normal,
    /// They run where nothing else wants to, and stop as soon as something does.
    Idle,
}

/// What a migration's data threads are owed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Yielding {
    class: Class,
    /// CPU seconds; less than nothing if they got more than the floor.
    owed_s: f64,
}

impl Yielding {
    /// The class for the next second, after one in which the threads used `cpu`. `floor` is the
    /// share of what they need that they get in any case, from 0 to 1.
    pub fn next(&mut self, floor: f64, cpu: CpuTime) -> Class {
        let needed = cpu.ran + cpu.waited;
        let ran_s = cpu.ran.as_secs_f64();
        let due_s = floor * needed.as_secs_f64();
        let is_enough = needed < NEEDED_MIN || ran_s >= due_s;
        self.owed_s = if self.class == Class::Idle && is_enough {
            0.0
        } else {
            let owed_s = self.owed_s + due_s - ran_s;
            owed_s.clamp(-AHEAD_S_MAX * due_s, OWED_S_MAX * due_s)
        };
        self.class = if self.owed_s > 0.0 { Class::Normal } else { Class::Idle };
        self.class
    }
}

/// How many lanes carry `limit_bits_per_s`: at least one for each of the `nics`, and no more than
/// the `usual` number.
#[must_use]
pub fn lanes(limit_bits_per_s: u64, nics: usize, usual: usize) -> usize {
    let needed = usize::try_from(limit_bits_per_s.div_ceil(LANE_BITS_PER_S)).unwrap_or(usize::MAX);
    needed.max(nics).max(1).min(usual.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that always want one CPU, and get these shares of it.
    struct Host {
        among_others: f64,
        idle: f64,
    }

    impl Host {
        fn second(&self, class: Class) -> CpuTime {
            let share = match class {
                Class::Normal => self.among_others,
                Class::Idle => self.idle,
            };
            let ran = Duration::from_secs_f64(share);
            CpuTime { ran, waited: Duration::from_secs(1) - ran }
        }

        /// The share that they got in all, and the longest run of seconds in the idle class.
        fn minutes(&self, floor: f64) -> (f64, u32) {
            let (mut yielding, mut class) = (Yielding::default(), Class::Idle);
            let (mut got_s, mut run, mut longest) = (0.0, 0, 0);
            for _ in 0..600 {
                let cpu = self.second(class);
                got_s += cpu.ran.as_secs_f64();
                run = if class == Class::Idle { run + 1 } else { 0 };
                longest = longest.max(run);
                class = yielding.next(floor, cpu);
            }
            (got_s / 600.0, longest)
        }
    }

    #[test]
    fn a_migration_gets_its_floor_on_a_full_host() {
        let full = Host { among_others: 0.25, idle: 0.003 };
        for floor in [0.01, 0.05, 0.1, 0.2, 0.24] {
            let (share, longest) = full.minutes(floor);
            assert!(share >= floor * 0.99, "{share} of {floor}");
            assert!(longest <= 4, "starved for {longest} s with {floor}");
        }
        // A low floor leaves others more than a high one.
        assert!(full.minutes(0.05).0 < full.minutes(0.2).0);
        // More than others leave is not to be had: it is as if they never yielded.
        let (share, _) = full.minutes(0.9);
        assert!((share - 0.25).abs() < 0.01, "{share}");
    }

    #[test]
    fn it_yields_as_long_as_idle_cpus_suffice() {
        let half = Host { among_others: 0.8, idle: 0.5 };
        assert_eq!(half.minutes(0.5), (0.5, 600));
    }

    #[test]
    fn one_second_without_a_cpu_is_enough_to_return() {
        let mut yielding = Yielding::default();
        let idle = Host { among_others: 1.0, idle: 1.0 };
        let full = Host { among_others: 0.25, idle: 0.0 };
        for _ in 0..100 {
            assert_eq!(yielding.next(0.2, idle.second(Class::Idle)), Class::Idle);
        }
        assert_eq!(yielding.next(0.2, full.second(Class::Idle)), Class::Normal);
        // A host that stays full for long: nothing of that is owed once it is idle again.
        for _ in 0..100 {
            yielding.next(0.9, full.second(Class::Normal));
        }
        let seconds = (1..).find(|_| yielding.next(0.2, idle.second(Class::Normal)) == Class::Idle);
        assert!(seconds.unwrap() <= 5, "{seconds:?}");
    }

    #[test]
    fn threads_that_wait_for_the_network_yield() {
        let mut yielding = Yielding::default();
        let moment = CpuTime { ran: Duration::ZERO, waited: Duration::from_millis(9) };
        assert_eq!(yielding.next(0.2, CpuTime::default()), Class::Idle);
        assert_eq!(yielding.next(0.2, moment), Class::Idle);
        let more = CpuTime { ran: Duration::ZERO, waited: Duration::from_millis(10) };
        assert_eq!(yielding.next(0.2, more), Class::Normal);
    }

    #[test]
    fn one_lane_carries_a_low_limit() {
        for (limit, nics, usual, expected) in [
            (200_000_000, 0, 8, 1),
            (250_000_000, 1, 8, 1),
            (250_000_001, 1, 8, 2),
            (1_000_000_000, 1, 8, 4),
            (1_000_000_000, 1, 2, 2),
            (200_000_000, 4, 8, 4),
            (u64::MAX, 1, 8, 8),
            (1, 0, 0, 1),
        ] {
            assert_eq!(lanes(limit, nics, usual), expected, "{limit} over {nics} of {usual}");
        }
    }
}
