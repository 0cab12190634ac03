//! How much one connection may have in flight: twice what its path holds.
//!
//! More would wait in the sockets at both ends. By then it has left the processor's
//! caches, so each further copy takes several times as long. Pages also become stale
//! there, and no other lane can take them.
//!
//! A path holds its delivery rate times the latency of a batch that waits behind no other
//! (Little's law; TCP's BBR derives its window from the same figures). Only lanes whose
//! peer is slower than they are ever reach their window.

use std::time::{Duration, Instant};

use page::SLOT_BYTES;

/// Always allowed: one batch being written, one in transit, and one being placed.
pub(crate) const LEAST_BYTES: u64 = 3 * SLOT_BYTES as u64;
/// The window as a multiple of what the path holds: a rate that can grow does so with
/// each round trip.
const GAIN: f64 = 2.0;
/// The best figures count for this long, and up to twice as long, because paths change.
const HALF: Duration = Duration::from_secs(5);

/// The departure of a batch that is in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departure {
    /// When the lane started to encode and write it.
    pub(crate) at: Instant,
    /// Bytes that the connection had delivered by then.
    pub(crate) delivered_bytes: u64,
}

/// Measurements of one connection's path.
#[derive(Debug)]
pub(crate) struct Window {
    /// The shortest time from a batch's departure to its acknowledgement, in seconds.
    shortest: Best,
    /// The most bytes a second delivered between a departure and its acknowledgement.
    fastest: Best,
    turned: Option<Instant>,
}

impl Default for Window {
    fn default() -> Self {
        Self { shortest: Best::new(f64::min), fastest: Best::new(f64::max), turned: None }
    }
}

impl Window {
    /// Notes that `batch` was acknowledged, after which the connection has delivered
    /// `delivered_bytes`.
    pub(crate) fn delivered(&mut self, batch: Departure, delivered_bytes: u64, now: Instant) {
        let took = now.saturating_duration_since(batch.at).as_secs_f64();
        if took <= 0.0 {
            return;
        }
        if self.turned.is_none_or(|turned| now.saturating_duration_since(turned) > HALF) {
            self.turned = Some(now);
            self.shortest.turn();
            self.fastest.turn();
        }
        let bytes = delivered_bytes.saturating_sub(batch.delivered_bytes);
        self.shortest.add(took);
        self.fastest.add(bytes as f64 / took);
    }

    /// Bytes that may be in flight.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
    pub(crate) fn bytes(&self) -> u64 {
        let (Some(shortest), Some(fastest)) = (self.shortest.get(), self.fastest.get()) else {
            return LEAST_BYTES;
        };
        LEAST_BYTES.max((GAIN * shortest * fastest) as u64)
    }
}

/// The best figure since the last turn or the one before it.
#[derive(Debug)]
struct Best {
    better: fn(f64, f64) -> f64,
    now: Option<f64>,
    before: Option<f64>,
}

impl Best {
    fn new(better: fn(f64, f64) -> f64) -> Self {
        Self { better, now: None, before: None }
    }

    fn turn(&mut self) {
        self.before = self.now.take();
    }

    fn add(&mut self, figure: f64) {
        self.now = Some(self.now.map_or(figure, |best| (self.better)(best, figure)));
    }

    fn get(&self) -> Option<f64> {
        match (self.now, self.before) {
            (Some(now), Some(before)) => Some((self.better)(now, before)),
            (now, before) => now.or(before),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A connection that always has data to send, in simulated time.
    struct Sending {
        begin: Instant,
        now: f64,
        delivered: u64,
        window: Window,
    }

    impl Sending {
        fn new() -> Self {
            Self { begin: Instant::now(), now: 0.0, delivered: 0, window: Window::default() }
        }

        fn at(&self, time: f64) -> Instant {
            self.begin + Duration::from_secs_f64(time)
        }

        /// Sends for `seconds` over a path with the latency `trip` and the rate
        /// `bytes_per_s`. Returns the bytes delivered in the last second.
        fn send(&mut self, trip: f64, bytes_per_s: f64, seconds: f64) -> f64 {
            let batch = SLOT_BYTES as u64;
            let end = self.now + seconds;
            let (mut free_at, mut late) = (self.now, 0);
            let mut flying = VecDeque::new();
            while self.now < end {
                while (flying.len() as u64) * batch < self.window.bytes() {
                    free_at = free_at.max(self.now) + batch as f64 / bytes_per_s;
                    let at = self.at(self.now);
                    flying.push_back((
                        free_at + trip,
                        Departure { at, delivered_bytes: self.delivered },
                    ));
                }
                let (arrives, left) = flying.pop_front().unwrap();
                self.now = arrives;
                self.delivered += batch;
                late += if self.now > end - 1.0 { batch } else { 0 };
                let at = self.at(self.now);
                self.window.delivered(left, self.delivered, at);
            }
            late as f64
        }
    }

    #[test]
    fn the_window_fills_any_path_and_little_more() {
        for (trip, rate) in [
            (0.0001, 12e6),
            (0.0001, 125e6),
            (0.0005, 3e9),
            (0.01, 1.25e9),
            (0.1, 125e6),
            (0.25, 1e9),
        ] {
            let mut sending = Sending::new();
            let delivered = sending.send(trip, rate, 6.0);
            let bytes = sending.window.bytes();
            assert!(delivered > 0.95 * rate, "{trip} s, {rate} bytes/s: {delivered}");
            let holds = trip * rate;
            let most = LEAST_BYTES as f64 + 3.0 * (holds + SLOT_BYTES as f64);
            assert!((bytes as f64) < most, "{trip} s, {rate} bytes/s: {bytes} in flight");
        }
    }

    #[test]
    fn a_path_that_becomes_longer_or_shorter_is_filled_again() {
        let mut sending = Sending::new();
        for trip in [0.001, 0.05, 0.001] {
            let delivered = sending.send(trip, 500e6, 30.0);
            assert!(delivered > 0.9 * 500e6, "{trip} s: {delivered}");
        }
    }

    #[test]
    fn a_clock_that_stands_still_is_ignored() {
        let (mut window, now) = (Window::default(), Instant::now());
        window.delivered(Departure { at: now, delivered_bytes: 0 }, 1 << 20, now);
        assert_eq!(window.bytes(), LEAST_BYTES);
    }
}
