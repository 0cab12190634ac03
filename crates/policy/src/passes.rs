//! What a guest dirties and has left, counted from QEMU's stream alone: of a QEMU that
//! somebody else commands nothing else is known.
//!
//! In each pass QEMU sends what got dirty since the pass before, so the bytes of a pass
//! divided by the time that the pass *before* it took are the guest's dirty rate. It is
//! known when the pass is over: one pass later than from a QEMU that is asked.
//!
//! What the next pass has to bring is not known at all before it is over. It is taken to
//! be what the guest dirtied while the last one ran, by the rate known so far and the
//! share of its CPU time that the guest had then.

use std::time::Duration;

/// Passes are counted together until they have taken this long: a sample may see
/// several of them end.
const PASS_LEAST_S: f64 = 0.1;
/// A share that is smaller says nothing of what a full one would be.
const SHARE_LEAST: f64 = 1e-3;

/// What has come, now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// Since the migration's beginning.
    pub at: Duration,
    /// Passes that have begun; the first is 1.
    pub pass: u32,
    /// When the last of them began.
    pub began: Duration,
    /// Bytes of pages that had come by then.
    pub bytes_then: u64,
    /// Bytes of pages that have come.
    pub bytes: u64,
    /// The share of its CPU time that the guest has had since the look before.
    pub share: f64,
    /// The VM's RAM.
    pub ram_bytes: u64,
}

/// What follows from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// What the guest dirties; none before the second pass is over.
    pub dirty: Option<Dirty>,
    /// What the pass that runs has still to bring, as far as can be told.
    pub left_bytes: Option<u64>,
    /// What the last pass brought a second. QEMU may be slower than the lanes.
    pub brought_bytes_per_s: Option<f64>,
    /// How long it took.
    pub took: Option<Duration>,
}

/// A dirty rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dirty {
    /// Clean pages that got dirty.
    pub bytes_per_s: f64,
    /// The share of its CPU time that the guest had meanwhile.
    pub share: f64,
}

/// Counts a migration's passes.
#[derive(Clone, Debug, PartialEq)]
pub struct Passes {
    at_s: f64,
    /// Seconds times share, since the beginning.
    shared_s: f64,
    pass: u32,
    /// When the pass that runs began.
    begun: Sums,
    /// What the pass before it took.
    before: Option<Took>,
    /// What the pass that runs is taken to bring.
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
    /// What follows after one more look.
    pub fn next(&mut self, look: &Look) -> Counted {
        let share = if look.share.is_finite() { look.share.clamp(0.0, 1.0) } else { 1.0 };
        let at_s = look.at.as_secs_f64().max(self.at_s);
        self.shared_s += (at_s - self.at_s) * share;
        self.at_s = at_s;
        let began_s = look.began.as_secs_f64().min(at_s);
        if look.pass > self.pass && began_s - self.begun.at_s >= PASS_LEAST_S {
            self.pass = look.pass;
            let shared_s = self.shared_s - (at_s - began_s) * share;
            self.end_pass(Sums { at_s: began_s, shared_s, bytes: look.bytes_then });
        }
        let come = look.bytes.saturating_sub(self.begun.bytes) as f64;
        self.counted.left_bytes = self.expected.map(|expected| whole(expected - come, look));
        self.counted
    }

    fn end_pass(&mut self, now: Sums) {
        let took = Took {
            seconds: now.at_s - self.begun.at_s,
            shared_s: (now.shared_s - self.begun.shared_s).max(0.0),
        };
        let bytes = now.bytes.saturating_sub(self.begun.bytes) as f64;
        // What comes in the first pass was not dirtied.
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
fn whole(bytes: f64, look: &Look) -> u64 {
    (bytes as u64).min(look.ram_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;
    const RAM: u64 = 500 * MB;

    /// How many seconds it took and megabytes it brought, and which share of its CPU time
    /// the guest had.
    type Pass = (f64, u64, f64);
    /// Megabytes a second, at which share, and how many are left.
    type Expected = (f64, f64, f64);

    /// What is known at the end of these.
    fn after(passes: &[Pass]) -> Counted {
        let mut counts = Passes::default();
        let (mut at_s, mut bytes) = (0.0, 0);
        let mut counted = Counted::default();
        for ((seconds, mb, share), pass) in passes.iter().zip(2..) {
            // In the middle of it, and at its end.
            let half = at_s + seconds / 2.0;
            let look = Look {
                at: Duration::from_secs_f64(half),
                pass: pass - 1,
                began: Duration::from_secs_f64(at_s),
                bytes_then: bytes,
                bytes: bytes + mb * MB / 2,
                share: *share,
                ram_bytes: RAM,
            };
            counts.next(&look);
            at_s += seconds;
            bytes += mb * MB;
            let at = Duration::from_secs_f64(at_s);
            counted = counts.next(&Look { at, pass, began: at, bytes_then: bytes, bytes, ..look });
        }
        counted
    }

    fn near(found: f64, expected: f64) -> bool {
        (found - expected).abs() <= expected.abs() * 1e-6
    }

    #[test]
    fn a_pass_brings_what_was_dirtied_while_the_one_before_it_ran() {
        let table: [(&[Pass], Option<Expected>); 7] = [
            (&[], None),
            // What the first one brings is RAM, and was not dirtied.
            (&[(10.0, 500, 1.0)], None),
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0)], Some((10.0, 1.0, 20.0))),
            // It follows: passes become shorter.
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0), (0.5, 20, 1.0)], Some((10.0, 1.0, 5.0))),
            // Throttled in the third pass, which still brings what came before: the
            // rate is that of the second.
            (&[(10.0, 500, 1.0), (2.0, 100, 1.0), (2.0, 100, 0.25)], Some((50.0, 1.0, 25.0))),
            // In the fourth it shows.
            (
                &[(10.0, 500, 1.0), (2.0, 100, 1.0), (2.0, 100, 0.25), (0.5, 25, 0.25)],
                Some((12.5, 0.25, 6.25)),
            ),
            // It has stopped to write.
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
    fn what_is_left_of_a_pass_shrinks_as_it_comes_and_is_never_more_than_ram() {
        let mut counts = Passes::default();
        let mut next = |at_s: f64, pass, began_s: f64, then_mb: u64, mb: u64| {
            let counted = counts.next(&Look {
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
        // More came than was expected.
        assert_eq!(next(7.0, 3, 4.0, 600, 720), Some(0));
        // 160 MB in a pass of 10 s, after one of 2 s.
        assert_eq!(next(14.0, 4, 14.0, 760, 760), Some(500));
    }

    /// Samples come late: what counts is when passes ended.
    #[test]
    fn passes_that_end_between_two_looks_are_counted_together() {
        let mut counts = Passes::default();
        let mut next = |at_ms, pass, began_ms, then_mb: u64| {
            let look = Look {
                at: Duration::from_millis(at_ms),
                pass,
                began: Duration::from_millis(began_ms),
                bytes_then: then_mb * MB,
                bytes: then_mb * MB,
                share: 1.0,
                ram_bytes: RAM,
            };
            counts.next(&look).dirty.map(|dirty| dirty.bytes_per_s / MB as f64)
        };
        assert_eq!(next(1050, 2, 1000, 500), None);
        // Of 20 ms each, with 1 MB: no pass alone says anything.
        assert_eq!(next(1100, 6, 1080, 504), None);
        assert!(near(next(1250, 12, 1200, 510).unwrap(), 10.0));
        assert!(near(next(1450, 22, 1400, 520).unwrap(), 50.0));
    }

    proptest! {
        #[test]
        fn strange_looks_make_no_strange_counts(
            looks in proptest::collection::vec(
                (0u64..9000, 0u32..9, 0u64..9000, any::<u64>(), any::<u64>(), any::<f64>()), 1..60,
            ),
            ram_bytes: u64,
        ) {
            let mut counts = Passes::default();
            for (at_ms, pass, began_ms, bytes_then, bytes, share) in looks {
                let counted = counts.next(&Look {
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
