//! Bounds what is requested from the storage in a second.
//!
//! A request starts only when the time for those before has passed. Unused time is
//! not saved up, a request is never larger than a 64th of a second's worth, and the
//! pace is a 64th below the bound: so in no second, wherever it starts, is more
//! requested than the operator allows. Late answers of the storage may still arrive
//! all at once.

use std::time::{Duration, Instant};

use page::PAGE_BYTES;
use parking_lot::{Condvar, Mutex};

/// The part of a second that one request may have, and that stays unused.
const PART: u64 = 64;

/// The least bound: below it a page takes too long.
const BYTES_PER_S_MIN: u64 = 64 << 10;

/// The arithmetic, without a clock.
#[derive(Debug, Default)]
struct Schedule {
    /// None: no bound.
    bytes_per_s: Option<u64>,
    /// When the next request may start, since the start of the clock.
    free_at: Duration,
}

impl Schedule {
    /// How large a request may start now, or when to ask again.
    fn begin(&mut self, now: Duration, wanted_bytes: u64) -> Result<u64, Duration> {
        let Some(bytes_per_s) = self.bytes_per_s else { return Ok(wanted_bytes) };
        if self.free_at > now {
            return Err(self.free_at);
        }
        let bytes = wanted_bytes.min((bytes_per_s / PART).max(PAGE_BYTES as u64));
        self.free_at = now + self.time(bytes);
        Ok(bytes)
    }

    /// Corrects the schedule for a request that had another size than started.
    fn settle(&mut self, begun: u64, read: u64) {
        if read > begun {
            self.free_at += self.time(read - begun);
        } else {
            self.free_at = self.free_at.saturating_sub(self.time(begun - read));
        }
    }

    fn set(&mut self, now: Duration, bytes_per_s: Option<u64>) {
        let bound = bytes_per_s.filter(|rate| *rate > 0);
        self.bytes_per_s = bound.map(|rate| rate.max(BYTES_PER_S_MIN));
        // Requests started under another bound delay the next one by a page's time at most.
        self.free_at = self.free_at.min(now + self.time(PAGE_BYTES as u64));
    }

    fn time(&self, bytes: u64) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else { return Duration::ZERO };
        let usable = bytes_per_s - bytes_per_s / PART;
        Duration::from_nanos(1) + Duration::from_secs_f64(bytes as f64 / usable as f64)
    }
}

/// The bound on what is read from a storage, shared by all its readers.
#[derive(Debug)]
pub struct Pace {
    schedule: Mutex<Schedule>,
    changed: Condvar,
    began: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            schedule: Mutex::new(Schedule::default()),
            changed: Condvar::new(),
            began: Instant::now(),
        }
    }
}

impl Pace {
    /// Sets the bound from now on, also for requests that wait; `None` or 0: no bound.
    /// Less than 64 KiB a second counts as 64 KiB.
    pub fn set(&self, bytes_per_s: Option<u64>) {
        self.schedule.lock().set(self.began.elapsed(), bytes_per_s);
        self.changed.notify_all();
    }

    /// The current bound.
    #[must_use]
    pub fn bytes_per_s(&self) -> Option<u64> {
        self.schedule.lock().bytes_per_s
    }

    /// Waits until a request may start; returns how large it may be. Its actual size
    /// is settled afterwards.
    pub(crate) fn begin(&self, wanted_bytes: u64) -> u64 {
        let mut schedule = self.schedule.lock();
        loop {
            match schedule.begin(self.began.elapsed(), wanted_bytes) {
                Ok(bytes) => return bytes,
                Err(at) => {
                    // Whichever way it ends, the schedule is asked again.
                    let _ = self.changed.wait_until(&mut schedule, self.began + at);
                }
            }
        }
    }

    pub(crate) fn settle(&self, begun: u64, read: u64) {
        let mut schedule = self.schedule.lock();
        if schedule.bytes_per_s.is_some() && begun != read {
            schedule.settle(begun, read);
            drop(schedule);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The most that starts in any second.
    fn most_in_a_second(begun: &[(Duration, u64)]) -> u64 {
        let (mut window, mut sum, mut most) = (VecDeque::new(), 0, 0);
        for (at, bytes) in begun {
            window.push_back((*at, *bytes));
            sum += bytes;
            while let Some((first, bytes)) = window.front()
                && *first + SECOND <= *at
            {
                sum -= bytes;
                window.pop_front();
            }
            most = most.max(sum);
        }
        most
    }

    proptest! {
        #[test]
        fn no_second_has_more_than_the_bound_and_little_time_is_lost(
            bytes_per_s in 300_000..2_000_000_000_u64,
            sizes in prop::collection::vec(1..257_u64, 1..20),
            late_us in prop::collection::vec(0..3000_u64, 1..20),
            rests_ms in prop::collection::vec(prop_oneof![9 => Just(0), 1 => 0..2000_u64], 1..50),
        ) {
            let mut schedule = Schedule::default();
            schedule.set(Duration::ZERO, Some(bytes_per_s));
            let (mut now, mut begun) = (Duration::ZERO, Vec::new());
            for nth in 0..3000 {
                let allowed = loop {
                    match schedule.begin(now, 1 << 20) {
                        Ok(allowed) => break allowed,
                        Err(at) => {
                            prop_assert!(at > now, "a wait moves on");
                            now = at + Duration::from_micros(late_us[nth % late_us.len()]);
                        }
                    }
                };
                let bytes = (sizes[nth % sizes.len()] * 4096).min(allowed);
                schedule.settle(allowed, bytes);
                begun.push((now, bytes));
                now += Duration::from_millis(rests_ms[nth % rests_ms.len()]);
            }
            let most = most_in_a_second(&begun);
            prop_assert!(most <= bytes_per_s, "{most} of {bytes_per_s}");
        }

        #[test]
        fn requests_that_are_never_late_use_the_bound(bytes_per_s in 100_000..2_000_000_000_u64) {
            let mut schedule = Schedule::default();
            schedule.set(Duration::ZERO, Some(bytes_per_s));
            let (mut now, mut sum) = (Duration::ZERO, 0);
            while now < SECOND {
                match schedule.begin(now, 1 << 20) {
                    Ok(bytes) => sum += bytes,
                    Err(at) => now = at,
                }
            }
            prop_assert!(sum as f64 > bytes_per_s as f64 * 0.96, "{sum} of {bytes_per_s}");
        }
    }

    #[test]
    fn without_a_bound_no_request_waits() {
        let pace = Pace::default();
        for bound in [None, Some(0)] {
            pace.set(bound);
            assert_eq!(pace.bytes_per_s(), None);
            assert_eq!(pace.begin(1 << 40), 1 << 40);
            pace.settle(1 << 40, 4096);
        }
        pace.set(Some(1));
        assert_eq!(pace.bytes_per_s(), Some(BYTES_PER_S_MIN));
        assert_eq!(pace.begin(1 << 20), 4096, "a page at least");
    }

    #[test]
    fn lifting_the_bound_wakes_waiting_requests() {
        let pace = Pace::default();
        pace.set(Some(BYTES_PER_S_MIN));
        // A page more than was started, a million times: hours.
        pace.settle(0, 4096 << 20);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| pace.begin(1 << 20));
            pace.set(None);
            assert_eq!(waiting.join().unwrap(), 1 << 20);
        });
        pace.set(Some(1 << 30));
        assert_eq!(pace.begin(1 << 20), 1 << 20, "and owes nothing");
    }
}
