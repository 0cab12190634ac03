//! How long an arriving VM tolerates a directory that answers slowly.
//!
//! Its source sends the names of 8 MiB of pages before it has an answer. So the answers limit the
//! speed, whether other hosts have any of the pages or not: one answer each 50 ms is less than a
//! 10 Gbit/s link carries. More queries at a time would not help.

use std::time::{Duration, Instant};

use super::{REST_LEAST, REST_MOST};

/// An answer within this time is fast enough: 8 MiB in 20 ms are 3 Gbit/s.
const FAST: Duration = Duration::from_millis(20);
/// An answer may take so many times as long if other hosts have most of the content.
const WORTH: u32 = 10;
/// The longest time that a source may be idle in all, waiting for one slow answer after the
/// other.
const HELD_UP_MAX: Duration = Duration::from_secs(1);

/// What matters about one answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) took: Duration,
    /// All that was requested from the source had arrived by then.
    pub(super) source_is_idle: bool,
    /// Other hosts have most of the content.
    pub(super) is_elsewhere: bool,
}

/// Decides whether the directory is queried.
#[derive(Debug, Default)]
pub(super) struct Patience {
    held_up: Duration,
    /// How long it is not queried, and until when.
    rest: Duration,
    until: Option<Instant>,
}

impl Patience {
    /// Whether it is queried at that time.
    pub(super) fn asks(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }

    /// Notes an answer at that time. Returns whether queries stop for a while.
    pub(super) fn answered(&mut self, answered: Answered, now: Instant) -> bool {
        let Answered { took, source_is_idle, is_elsewhere } = answered;
        let is_slow = took > if is_elsewhere { FAST * WORTH } else { FAST };
        if !is_slow || !source_is_idle {
            *self = Self::default();
            return false;
        }
        self.held_up += took;
        if self.held_up <= HELD_UP_MAX {
            return false;
        }
        // One slow answer after that is enough.
        self.rest = (self.rest * 2).clamp(REST_LEAST, REST_MOST);
        self.until = Some(now + self.rest);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many answers of that kind there are before the directory is not queried.
    fn until_rest(patience: &mut Patience, answered: Answered, now: Instant) -> Option<u32> {
        (0..10_000).find(|_| patience.answered(answered, now))
    }

    #[test]
    fn a_directory_rests_if_sources_wait_for_it_alone() {
        let now = Instant::now();
        let slow = |took_ms, source_is_idle, is_elsewhere| {
            let took = Duration::from_millis(took_ms);
            let answered = Answered { took, source_is_idle, is_elsewhere };
            until_rest(&mut Patience::default(), answered, now)
        };
        assert_eq!(slow(20, true, false), None, "it is fast");
        assert_eq!(slow(50, true, false), Some(20));
        assert_eq!(slow(50, true, true), None, "it is worth it");
        assert_eq!(slow(900, true, true), Some(1));
        assert_eq!(slow(900, false, false), None, "the link is busy");
    }

    #[test]
    fn it_rests_longer_each_time_until_it_is_fast() {
        let (mut patience, mut now) = (Patience::default(), Instant::now());
        let (took, fast) = (Duration::from_millis(900), Duration::from_millis(1));
        let slow = Answered { took, source_is_idle: true, is_elsewhere: false };
        let mut rests = Vec::new();
        assert!(!patience.answered(slow, now), "it may be so once");
        for _ in 0..6 {
            assert!(patience.asks(now) && patience.answered(slow, now));
            let began = now;
            while !patience.asks(now) {
                now += Duration::from_millis(100);
            }
            rests.push((now - began).as_millis());
        }
        assert_eq!(rests, [500, 1000, 2000, 4000, 8000, 8000]);
        assert!(!patience.answered(Answered { took: fast, ..slow }, now));
        assert!(!patience.answered(slow, now), "all is as at first");
    }
}
