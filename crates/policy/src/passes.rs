//! The guest's dirty rate and remainder, derived from QEMU's stream alone: if another manager
//! commands a QEMU, nothing else is known of it.
//!
//! In each pass QEMU sends the pages that got dirty during the pass before. So the bytes of a pass
//! divided by the duration of the pass *before* it are the guest's dirty rate. The rate is known
//! when the pass ends, one pass later than from a QEMU that can be queried.
//!
//! The size of a pass is not known before it ends. It is estimated as what the guest dirtied during
//! the pass before, from the rate known so far and the share of CPU time that the guest had then.

use std::time::Duration;

/// Passes are counted together until they have taken this long, because several of them may end
/// between two samples.
const PASS_LEAST_S: f64 = 0.1;
/// A rate at a smaller share says nothing about the rate at a full one.
const SHARE_LEAST: f64 = 1e-3;

/// The state of the stream at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassesInput {
    /// Time since the migration's beginning.
    pub at: Duration,
    /// Number of the current pass; the first is 1.
    pub pass: u32,
    /// When the current pass began.
    pub began: Duration,
    /// Bytes of pages received by then.
    pub bytes_then: u64,
    /// Bytes of pages received so far.
    pub bytes: u64,
    /// The share of CPU time that the guest has had since the previous input.
    pub share: f64,
    /// The VM's RAM.
    pub ram_bytes: u64,
}

/// What the passes tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// The dirty rate; none before the second pass has ended.
    pub dirty: Option<Dirty>,
    /// Bytes that the current pass has yet to send, by estimate.
    pub left_bytes: Option<u64>,
    /// Bytes per second of the last pass. QEMU may be slower than the lanes.
    pub brought_bytes_per_s: Option<f64>,
    /// The duration of the last pass.
    pub took: Option<Duration>,
}

/// A dirty rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dirty {
    /// Rate at which clean pages got dirty.
    pub bytes_per_s: f64,
    /// The share of CPU time that the guest had meanwhile.
    pub share: f64,
}

/// Counts a migration's passes.
#[derive(Clone, Debug, PartialEq)]
pub struct Passes {
    at_s: f64,
    /// Seconds times share, summed since the beginning.
    shared_s: f64,
    pass: u32,
    /// Sums when the current pass began.
    begun: Sums,
    /// The duration of the pass before it.
    before: Option<Took>,
    /// The estimated size of the current pass.
    expected: Option<f64>,
    counted: Counted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    at_s: f64,
    shared_s: f64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Took {
    seconds: f64,
    shared_s: f64,
}

impl Default for Passes {
    fn default() -> Self {
        Self {
            at_s: 0.0,
            shared_s: 0.0,
            pass: 1,
            begun: Sums::default(),
            before: None,
            expected: None,
            counted: Counted::default(),
        }
    }
}

impl Passes {
    /// The result after one more input.
    pub fn next(&mut self, input: &PassesInput) -> Counted {
        let share = if input.share.is_finite() { input.share.clamp(0.0, 1.0) } else { 1.0 };
        let at_s = input.at.as_secs_f64().max(self.at_s);
        self.shared_s += (at_s - self.at_s) * share;
        self.at_s = at_s;
        let began_s = input.began.as_secs_f64().min(at_s);
        if input.pass > self.pass && began_s - self.begun.at_s >= PASS_LEAST_S {
            self.pass = input.pass;
            let shared_s = self.shared_s - (at_s - began_s) * share;
            self.end_pass(Sums { at_s: began_s, shared_s, bytes: input.bytes_then });
        }
        let come = input.bytes.saturating_sub(self.begun.bytes) as f64;
        self.counted.left_bytes = self.expected.map(|expected| whole(expected - come, input));
        self.counted
    }

    fn end_pass(&mut self, now: Sums) {
        let took = Took {
            seconds: now.at_s - self.begun.at_s,
            shared_s: (now.shared_s - self.begun.shared_s).max(0.0),
        };
        let bytes = now.bytes.saturating_sub(self.begun.bytes) as f64;
        // The content of the first pass was not dirtied.
        if let Some(before) = self.before {
            let dirty = Dirty {
                bytes_per_s: bytes / before.seconds,
                share: (before.shared_s / before.seconds).clamp(SHARE_LEAST, 1.0),
            };
            self.expected = Some(dirty.bytes_per_s / dirty.share * took.shared_s);
            self.counted.dirty = Some(dirty);
            self.counted.brought_bytes_per_s = Some(bytes / took.seconds);
            self.counted.took = Some(Duration::from_secs_f64(took.seconds));
        }
        (self.begun, self.before) = (now, Some(took));
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` keeps within the type's bounds, and no more than RAM is left"
)]
fn whole(bytes: f64, input: &PassesInput) -> u64 {
    (bytes as u64).min(input.ram_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;
    const RAM: u64 = 500 * MB;

    /// A pass: seconds, megabytes, and the guest's share of CPU time.
    type Pass = (f64, u64, f64);
    /// Megabytes per second, at which share, and megabytes left.
    type Expected = (f64, f64, f64);

    /// The result at the end of these passes.
    fn after(passes: &[Pass]) -> Counted {
        let mut counts = Passes::default();
        let (mut at_s, mut bytes) = (0.0, 0);
        let mut counted = Counted::default();
        for ((seconds, mb, share), pass) in passes.iter().zip(2..) {
            // One input in the middle of the pass, and one at its end.
            let half = at_s + seconds / 2.0;
            let input = PassesInput {
                at: Duration::from_secs_f64(half),
                pass: pass - 1,
                began: Duration::from_secs_f64(at_s),
                bytes_then: bytes,
                bytes: bytes + mb * MB / 2,
                share: *share,
                ram_bytes: RAM,
            };
            counts.next(&input);
            at_s += seconds;
            bytes += mb * MB;
            let at = Duration::from_secs_f64(at_s);
            counted = counts.next(&PassesInput {
                at,
                pass,
                began: at,
                bytes_then: bytes,
                bytes,
                ..input
            });
        }
        counted
    }

    fn near(found: f64, expected: f64) -> bool {
        (found - expected).abs() <= expected.abs() * 1e-6
    }

    #[test]
    fn a_pass_sends_what_was_dirtied_during_the_pass_before() {
        let table: [(&[Pass], Option<Expected>); 7] = [
            (&[], None),
            // The first pass sends RAM, which was not dirtied.
            (&[(10.0, 500, 1.0)], None),
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0)], Some((10.0, 1.0, 20.0))),
            // The dirty rate stays the same while passes get shorter.
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0), (0.5, 20, 1.0)], Some((10.0, 1.0, 5.0))),
            // Throttled in the third pass, which still sends what was dirtied before: the rate is
            // that of the second.
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0), (2.0, 100, 0.25)], Some((50.0, 1.0, 25.0))),
            // The fourth pass shows the effect.
            (
                &[(10.0, 500, 1.0), (2.0, 100, 1.0), (2.0, 100, 0.25), (0.5, 25, 0.25)],
                Some((12.5, 0.25, 6.25)),
            ),
            // The guest has stopped writing.
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0), (1.0, 0, 1.0)], Some((0.0, 1.0, 0.0))),
        ];
        for (passes, expected) in table {
            let counted = after(passes);
            let Some((rate, share, left)) = expected else {
                assert_eq!(counted, Counted::default(), "{passes:?}");
                continue;
            };
            let dirty = counted.dirty.unwrap();
            assert!(near(dirty.bytes_per_s, rate * MB as f64), "{passes:?}: {dirty:?}");
            assert!(near(dirty.share, share), "{passes:?}: {dirty:?}");
            let found = counted.left_bytes.unwrap() as f64;
            assert!((found - left * MB as f64).abs() <= 1.0, "{passes:?}: {found}");
        }
    }

    #[test]
    fn the_remainder_of_a_pass_shrinks_and_never_exceeds_ram() {
        let mut counts = Passes::default();
        let mut next = |at_s: f64, pass, began_s: f64, then_mb: u64, mb: u64| {
            let counted = counts.next(&PassesInput {
                at: Duration::from_secs_f64(at_s),
                pass,
                began: Duration::from_secs_f64(began_s),
                bytes_then: then_mb * MB,
                bytes: mb * MB,
                share: 1.0,
                ram_bytes: RAM,
            });
            counted.left_bytes.map(|bytes| bytes / MB)
        };
        assert_eq!(next(1.0, 1, 0.0, 0, 300), None);
        assert_eq!(next(2.0, 2, 2.0, 500, 500), None);
        assert_eq!(next(4.0, 3, 4.0, 600, 600), Some(100));
        assert_eq!(next(5.0, 3, 4.0, 600, 640), Some(60));
        // More arrived than was estimated.
        assert_eq!(next(7.0, 3, 4.0, 600, 720), Some(0));
        // 160 MB in a pass of 10 s, after one of 2 s.
        assert_eq!(next(14.0, 4, 14.0, 760, 760), Some(500));
    }

    /// Samples are late, so the ends of passes count, not the times of samples.
    #[test]
    fn passes_that_end_between_two_looks_are_counted_together() {
        let mut counts = Passes::default();
        let mut next = |at_ms, pass, began_ms, then_mb: u64| {
            let input = PassesInput {
                at: Duration::from_millis(at_ms),
                pass,
                began: Duration::from_millis(began_ms),
                bytes_then: then_mb * MB,
                bytes: then_mb * MB,
                share: 1.0,
                ram_bytes: RAM,
            };
            counts.next(&input).dirty.map(|dirty| dirty.bytes_per_s / MB as f64)
        };
        assert_eq!(next(1050, 2, 1000, 500), None);
        // Passes of 20 ms with 1 MB each: no pass alone says anything.
        assert_eq!(next(1100, 6, 1080, 504), None);
        assert!(near(next(1250, 12, 1200, 510).unwrap(), 10.0));
        assert!(near(next(1450, 22, 1400, 520).unwrap(), 50.0));
    }

    proptest! {
        #[test]
        fn invalid_looks_give_results_within_bounds(
            inputs in proptest::collection::vec(
                (0u64..9000, 0u32..9, 0u64..9000, any::<u64>(), any::<u64>(), any::<f64>()), 1..60,
            ),
            ram_bytes: u64,
        ) {
            let mut counts = Passes::default();
            for (at_ms, pass, began_ms, bytes_then, bytes, share) in inputs {
                let counted = counts.next(&PassesInput {
                    at: Duration::from_millis(at_ms),
                    pass,
                    began: Duration::from_millis(began_ms),
                    bytes_then,
                    bytes,
                    share,
                    ram_bytes,
                });
                prop_assert!(counted.left_bytes.is_none_or(|left| left <= ram_bytes));
                if let Some(dirty) = counted.dirty {
                    prop_assert!(dirty.bytes_per_s.is_finite() && dirty.bytes_per_s >= 0.0);
                    prop_assert!(dirty.share > 0.0 && dirty.share <= 1.0);
                }
                prop_assert!(counted.brought_bytes_per_s.is_none_or(|rate| rate.is_finite() && rate >= 0.0));
            }
        }
    }
}
