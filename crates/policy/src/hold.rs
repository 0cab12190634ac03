//! Decides whether QEMU's next pass waits while another host, VM or disk still provides content to
//! the destination.
//!
//! QEMU can't stop the VM until all of that has arrived. Meanwhile the guest rewrites what a pass
//! sends, so it would be sent again. So the next pass begins when sending its pages takes as long
//! as the rest takes to arrive.

use std::collections::VecDeque;
use std::time::Duration;

/// The rate of arrival is the mean over this many samples.
const SAMPLES: usize = 10;
/// The last pass begins this much earlier than necessary.
const MARGIN_S: f64 = 0.3;
/// A pass waits no longer than this, whatever is still to arrive, because it is not known how much
/// of its memory a guest writes.
const HELD_MAX: Duration = Duration::from_secs(2);

/// One sample, taken at about equal intervals.
#[derive(Clone, Copy, Debug)]
pub struct HoldInput {
    /// Bytes that another host, VM or disk is to provide.
    pub pending_bytes: u64,
    /// Time since the previous sample.
    pub elapsed: Duration,
    /// Time since the last pass began.
    pub age: Duration,
    /// The guest's dirty rate; none if it is not known.
    pub dirty_bytes_per_s: Option<f64>,
    /// Bytes per second that the network delivers.
    pub delivered_bytes_per_s: Option<f64>,
}

/// Decides from one sample after another.
#[derive(Debug, Default)]
pub struct Hold {
    seen: VecDeque<(u64, Duration)>,
}

impl Hold {
    /// Whether the next pass is to wait.
    pub fn next(&mut self, input: HoldInput) -> bool {
        self.seen.push_back((input.pending_bytes, input.elapsed));
        if self.seen.len() > SAMPLES {
            self.seen.pop_front();
        }
        if input.pending_bytes == 0 || input.age >= HELD_MAX {
            return false;
        }
        // The remaining time is not known.
        let Some(rest_s) = self.rest_s(input.pending_bytes) else { return true };
        let dirty_bytes = input.dirty_bytes_per_s.unwrap_or(0.0) * input.age.as_secs_f64();
        let sends_s = dirty_bytes / input.delivered_bytes_per_s.unwrap_or(0.0).max(1.0);
        rest_s > sends_s + MARGIN_S
    }

    /// The time that the rest takes at the recent rate of arrival.
    fn rest_s(&self, pending_bytes: u64) -> Option<f64> {
        let (first, _) = self.seen.front()?;
        let elapsed: Duration = self.seen.iter().skip(1).map(|(_, elapsed)| *elapsed).sum();
        let came = first.checked_sub(pending_bytes).filter(|came| *came > 0)?;
        Some(pending_bytes as f64 * elapsed.as_secs_f64() / came as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(50);

    /// The times at which passes begin while `pending` bytes arrive at a rate. The guest writes
    /// `dirty` bytes per second, and the network delivers 50 MB/s.
    fn passes(pending: u64, rate: u64, dirty: f64) -> Vec<u64> {
        let mut hold = Hold::default();
        let (mut age, mut began) = (Duration::ZERO, Vec::new());
        for tick in 0..400 {
            let input = HoldInput {
                pending_bytes: pending.saturating_sub(rate * tick / 20),
                elapsed: TICK,
                age,
                dirty_bytes_per_s: Some(dirty),
                delivered_bytes_per_s: Some(50e6),
            };
            age += TICK;
            if !hold.next(input) {
                began.push(tick * 50);
                age = Duration::ZERO;
            }
            if input.pending_bytes == 0 {
                break;
            }
        }
        began
    }

    #[test]
    fn passes_begin_when_they_take_as_long_as_the_rest() {
        // The rest takes a second: the pass begins 0.3 s before its end.
        assert_eq!(passes(100_000_000, 100_000_000, 0.0)[0], 700);
        // Sending what is dirtied in 0.6 s takes 0.1 s.
        assert_eq!(passes(100_000_000, 100_000_000, 10e6)[0], 600);
        // The guest writes as fast as the network delivers: half of the time.
        assert!((300..=400).contains(&passes(100_000_000, 100_000_000, 50e6)[0]));
    }

    #[test]
    fn slow_or_missing_content_holds_no_pass_for_ever() {
        let began = passes(1 << 40, 0, 1e6);
        assert!(began.windows(2).all(|two| two[1] - two[0] <= 2_050), "{began:?}");
        assert!(began.len() >= 9, "{began:?}");
        assert_eq!(passes(0, 1, 1e6), [0], "there is nothing to wait for");
    }
}
