//! The size of requests: such that the storage answers each in a tenth of a second,
//! with all that are in flight.
//!
//! Large requests are cheap. But on slow storage the reader has to wait for those in
//! flight at the end, when all other items have been taken: sixteen of 1 MiB take 3 s
//! at 50 Mbit/s. And a request must be answered long before it counts as stalled,
//! however slow the storage has become.
//!
//! Also the size of the gaps between wanted pages that are read with them. A request
//! costs CPU time at both ends; a gap costs time of the storage or its network. On
//! storage with 1 Gbit/s no gap is worth the request that it saves; at ten times that,
//! requests for one to three pages keep all CPUs busy.

use std::time::{Duration, Instant};

/// How long a request should take.
const TARGET: Duration = Duration::from_millis(100);
/// The size to start with.
const FIRST: u64 = 256 << 10;
/// The smallest size: below it, the requests themselves take most of the time.
const MIN: u64 = 64 << 10;

/// A gap is read if that takes less. This is somewhat more than a request costs: many
/// requests slow storage down, and larger ones then show how fast it really is.
const REQUEST_COST: Duration = Duration::from_micros(30);
/// Over how long the storage's rate is measured.
const WINDOW: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Size {
    bytes: u64,
    max: u64,
    /// Requests that started earlier say nothing about the last change.
    changed: Instant,
    rate: Rate,
}

/// How fast the storage answers while requests are in flight.
#[derive(Debug)]
struct Rate {
    bytes_per_s: f64,
    bytes: u64,
    /// Since when those bytes were read, without the time in which nothing was requested.
    since: Instant,
    measured_at: Instant,
}

impl Rate {
    fn measured(&mut self, bytes: u64, began: Instant, now: Instant) {
        self.since += began.saturating_duration_since(self.measured_at);
        self.measured_at = now;
        self.bytes += bytes;
        let passed = now.saturating_duration_since(self.since);
        if passed >= WINDOW {
            self.bytes_per_s = self.bytes as f64 / passed.as_secs_f64();
            self.bytes = 0;
            self.since = now;
        }
    }
}

impl Size {
    pub(crate) fn new(max: u64, now: Instant) -> Self {
        let rate = Rate { bytes_per_s: 0.0, bytes: 0, since: now, measured_at: now };
        Self { bytes: FIRST.min(max), max, changed: now, rate }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The largest gap that is worth reading.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(crate) fn gap_bytes_max(&self) -> u64 {
        (self.rate.bytes_per_s * REQUEST_COST.as_secs_f64()) as u64
    }

    /// Records that a request was answered.
    pub(crate) fn measured(&mut self, bytes: u64, began: Instant, now: Instant) {
        self.rate.measured(bytes, began, now);
        if began < self.changed {
            return;
        }
        let took = now.saturating_duration_since(began);
        let (size, from) = if took > TARGET * 2 {
            // Requests ahead of the next ones still have the old size.
            ((self.bytes / 2).max(MIN.min(self.max)), now + took)
        } else if took < TARGET / 2 && bytes > self.bytes / 2 {
            ((self.bytes * 2).min(self.max), now)
        } else {
            return;
        };
        if size != self.bytes {
            self.bytes = size;
            self.changed = from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates storage that answers in order, with `bytes_per_s`, and `in_flight`
    /// requests at a time. Returns the final size.
    fn simulate(bytes_per_s: u64, in_flight: u64, size: &mut Size, now: &mut Instant) -> u64 {
        let mut flying = std::collections::VecDeque::new();
        let mut free_at = *now;
        for _ in 0..in_flight * 30 {
            while flying.len() < usize::try_from(in_flight).unwrap() {
                let bytes = size.bytes();
                let time = Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64);
                free_at = free_at.max(*now) + time;
                flying.push_back((bytes, *now, free_at));
            }
            let (bytes, began, ends) = flying.pop_front().unwrap();
            *now = ends;
            size.measured(bytes, began, *now);
        }
        size.bytes()
    }

    #[test]
    fn a_request_takes_about_what_it_should() {
        let mut now = Instant::now();
        let mut size = Size::new(1 << 20, now);
        assert_eq!(simulate(1 << 30, 16, &mut size, &mut now), 1 << 20);
        // 500 Mbit/s: 16 x 512 KiB are 134 ms.
        assert_eq!(simulate(62_500_000, 16, &mut size, &mut now), 512 << 10);
        assert_eq!(simulate(6_250_000, 16, &mut size, &mut now), 64 << 10);
        assert_eq!(simulate(1 << 30, 16, &mut size, &mut now), 1 << 20);
    }

    #[test]
    fn gaps_are_read_where_bytes_are_cheap() {
        for (bytes_per_s, gap_bytes) in [(62_500_000, 1875), (1_000_000_000, 30_000)] {
            let mut now = Instant::now();
            let mut size = Size::new(1 << 20, now);
            assert_eq!(size.gap_bytes_max(), 0, "nothing is known yet");
            for _ in 0..2 {
                simulate(bytes_per_s, 16, &mut size, &mut now);
                let off = size.gap_bytes_max().abs_diff(gap_bytes);
                assert!(off < gap_bytes / 10, "{}", size.gap_bytes_max());
                // Time in which nothing is wanted doesn't make the storage slow.
                now += Duration::from_secs(3600);
            }
        }
    }

    #[test]
    fn small_requests_say_nothing_of_larger_ones() {
        let now = Instant::now();
        let mut size = Size::new(1 << 20, now);
        size.measured(4096, now, now);
        assert_eq!(size.bytes(), FIRST);
        let mut size = Size::new(32 << 10, now);
        assert_eq!(size.bytes(), 32 << 10);
        size.measured(4096, now, now + TARGET * 3);
        assert_eq!(size.bytes(), 32 << 10);
    }
}
