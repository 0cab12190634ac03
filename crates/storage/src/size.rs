//! How large requests are: so large that the storage answers in a tenth of a
//! second, with all that is in flight.
//!
//! Large requests are cheap. But on slow storage those in flight are what one
//! waits for at the end, when the other end has taken the rest: sixteen of a
//! MiB take 3 s at 50 Mbit/s. And a request must be answered long before it
//! counts as stalled, however slow the storage has become.

use std::time::{Duration, Instant};

/// What a request should take.
const TARGET: Duration = Duration::from_millis(100);
/// With what it begins.
const FIRST: u64 = 256 << 10;
/// Below it, requests themselves are what takes time.
const MIN: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct Size {
    bytes: u64,
    max: u64,
    /// What began before says nothing of the last change.
    changed: Instant,
}

impl Size {
    pub(crate) fn new(max: u64, now: Instant) -> Self {
        Self { bytes: FIRST.min(max), max, changed: now }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A request was answered.
    pub(crate) fn heard(&mut self, bytes: u64, began: Instant, now: Instant) {
        if began < self.changed {
            return;
        }
        let took = now.saturating_duration_since(began);
        let (size, from) = if took > TARGET * 2 {
            // Those in front of the next ones still have the old size.
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

    /// Storage that answers in order, `bytes_per_s` of it; `in_flight` are
    /// asked at once. Returns the size at the end.
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
            size.heard(bytes, began, *now);
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
    fn small_requests_say_nothing_of_larger_ones() {
        let now = Instant::now();
        let mut size = Size::new(1 << 20, now);
        size.heard(4096, now, now);
        assert_eq!(size.bytes(), FIRST);
        let mut size = Size::new(32 << 10, now);
        assert_eq!(size.bytes(), 32 << 10);
        size.heard(4096, now, now + TARGET * 3);
        assert_eq!(size.bytes(), 32 << 10);
    }
}
