//! Whether QEMU's next pass waits while the destination still gets content from
//! elsewhere.
//!
//! Until it has all of that, QEMU can't stop the VM; what a pass brings meanwhile the
//! guest writes once more, and it is sent once more. So the next one begins when what
//! it will bring takes as long to send as the rest takes to come.

use std::collections::VecDeque;
use std::time::Duration;

/// How fast the rest comes is the mean over so many looks.
const LOOKS: usize = 10;
/// The last pass begins so much before it has to.
const MARGIN_S: f64 = 0.3;
/// A pass waits no longer than that, whatever is to come: nobody knows how much of
/// its memory a guest writes.
const HELD_MAX: Duration = Duration::from_secs(2);

/// What is seen, each time after about the same time.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Bytes that come from elsewhere.
    pub pending_bytes: u64,
    /// Since the look before.
    pub elapsed: Duration,
    /// Since the last pass began.
    pub age: Duration,
    /// What the guest writes per second; none if it is not known.
    pub dirty_bytes_per_s: Option<f64>,
    /// What the network delivers per second.
    pub delivered_bytes_per_s: Option<f64>,
}

/// Decides.
#[derive(Debug, Default)]
pub struct Hold {
    seen: VecDeque<(u64, Duration)>,
}

impl Hold {
    /// Whether the next pass is to wait.
    pub fn next(&mut self, look: Look) -> bool {
        self.seen.push_back((look.pending_bytes, look.elapsed));
        if self.seen.len() > LOOKS {
            self.seen.pop_front();
        }
        if look.pending_bytes == 0 || look.age >= HELD_MAX {
            return false;
        }
        // Nobody knows how long it takes.
        let Some(rest_s) = self.rest_s(look.pending_bytes) else { return true };
        let dirty_bytes = look.dirty_bytes_per_s.unwrap_or(0.0) * look.age.as_secs_f64();
        let sends_s = dirty_bytes / look.delivered_bytes_per_s.unwrap_or(0.0).max(1.0);
        rest_s > sends_s + MARGIN_S
    }

    /// How long the rest takes, as fast as it came of late.
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

    /// When passes begin while `pending` bytes come at a rate: of a guest that writes
    /// `dirty` a second, over a network of 50 MB/s.
    fn passes(pending: u64, rate: u64, dirty: f64) -> Vec<u64> {
        let mut hold = Hold::default();
        let (mut age, mut began) = (Duration::ZERO, Vec::new());
        for tick in 0..400 {
            let look = Look {
                pending_bytes: pending.saturating_sub(rate * tick / 20),
                elapsed: TICK,
                age,
                dirty_bytes_per_s: Some(dirty),
                delivered_bytes_per_s: Some(50e6),
            };
            age += TICK;
            if !hold.next(look) {
                began.push(tick * 50);
                age = Duration::ZERO;
            }
            if look.pending_bytes == 0 {
                break;
            }
        }
        began
    }

    #[test]
    fn passes_begin_when_they_take_as_long_as_the_rest() {
        // A second's worth: the last 0.3 s.
        assert_eq!(passes(100_000_000, 100_000_000, 0.0)[0], 700);
        // What 0.6 s dirty takes 0.1 s.
        assert_eq!(passes(100_000_000, 100_000_000, 10e6)[0], 600);
        // It can't be followed: half of the time.
        assert!((300..=400).contains(&passes(100_000_000, 100_000_000, 50e6)[0]));
    }

    #[test]
    fn what_takes_long_or_does_not_come_holds_no_pass_for_ever() {
        let began = passes(1 << 40, 0, 1e6);
        assert!(began.windows(2).all(|two| two[1] - two[0] <= 2_050), "{began:?}");
        assert!(began.len() >= 9, "{began:?}");
        assert_eq!(passes(0, 1, 1e6), [0], "there is nothing to wait for");
    }
}
