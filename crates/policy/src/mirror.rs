//! Decides when a disk's mirror needs help to keep up with its guest.
//!
//! A mirror copies in the background and doesn't delay the guest's writes. If the guest writes as
//! fast as the mirror copies, it never converges. Making writes wait for their copy always helps,
//! but while much is left to copy, each write then takes hundreds of milliseconds. So this is done
//! late: when little is left, or after long enough without progress.

use std::time::Duration;

/// Net progress is judged over this much time.
const WINDOW: Duration = Duration::from_secs(4);
/// A mirror that gains less than this share of what it copies makes no
/// progress.
const GAIN_MIN: f64 = 0.1;
/// With this little left, writes wait only briefly.
const LITTLE_BYTES: u64 = 64 << 20;
/// How far a mirror that has copied everything once may lag behind, as time to copy the rest.
const BEHIND_S: f64 = 0.1;
/// How far it may lag behind in any case.
const BEHIND_BYTES: u64 = 1 << 20;
/// Windows without progress after which the guest's writes are limited even with much left.
const WINDOWS_MAX: u32 = 3;

/// A mirror's progress at one time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Bytes that it has to copy in all; grows while the guest writes.
    pub total_bytes: u64,
    /// Bytes that it has copied.
    pub done_bytes: u64,
    /// Whether it has caught up once.
    pub ready: bool,
}

/// The state of one mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Catching {
    begin: Option<(u64, u64)>,
    elapsed: Duration,
    in_vain: u32,
    bytes_per_s: f64,
}

impl Catching {
    /// The state after `elapsed` more, and the limit for the guest's writes to the disk if its
    /// mirror needs help now.
    #[must_use]
    pub fn next(self, sample: Sample, elapsed: Duration) -> (Self, Option<u64>) {
        let left = sample.total_bytes.saturating_sub(sample.done_bytes);
        let Some((begin_left, begin_done)) = self.begin else {
            return (Self { begin: Some((left, sample.done_bytes)), ..self }, None);
        };
        let elapsed = self.elapsed + elapsed;
        if elapsed < WINDOW {
            return (Self { elapsed, ..self }, None);
        }
        let copied = sample.done_bytes.saturating_sub(begin_done);
        let gained = begin_left as f64 - left as f64;
        let in_vain = if gained < copied as f64 * GAIN_MIN { self.in_vain + 1 } else { 0 };
        let bytes_per_s = copied as f64 / elapsed.as_secs_f64();
        let begin = Some((left, sample.done_bytes));
        let next = Self { begin, elapsed: Duration::ZERO, in_vain, bytes_per_s };
        let late = if sample.ready {
            in_vain > 0 && !next.is_close(sample)
        } else {
            in_vain > 0 && (left <= LITTLE_BYTES || in_vain >= WINDOWS_MAX)
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let half = (bytes_per_s / 2.0) as u64;
        (next, late.then_some(half.max(1 << 20)))
    }

    /// Whether the mirror is close enough for the VM to stop: the remainder takes a moment.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn is_close(self, sample: Sample) -> bool {
        let left = sample.total_bytes.saturating_sub(sample.done_bytes);
        sample.ready && left <= BEHIND_BYTES.max((self.bytes_per_s * BEHIND_S) as u64)
    }
}

/// A flush that takes no longer fits the downtime.
const FLUSH_MAX: Duration = Duration::from_millis(100);
/// A flush is faster than the best one so far if it is faster by this share.
const FLUSH_GAIN: f64 = 0.2;
/// After this many flushes in a row that were not faster, the storage can't do better.
const FLUSHES_MAX: u32 = 3;

/// How far the destination's storage lags behind its mirrors, measured by how long a flush takes.
/// The downtime includes such a flush, and a mirror that has caught up says nothing about it: what
/// it has written may still be in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Behind {
    best: Option<Duration>,
    in_vain: u32,
}

impl Behind {
    /// The state after a flush that took this long, and whether the VM may stop: the next flush
    /// will be short, or can't become shorter.
    #[must_use]
    pub fn next(self, took: Duration) -> (Self, bool) {
        if took <= FLUSH_MAX {
            return (Self::default(), true);
        }
        let gained = self.best.is_none_or(|best| took < best.mul_f64(1.0 - FLUSH_GAIN));
        let in_vain = if gained { 0 } else { self.in_vain + 1 };
        let best = Some(self.best.map_or(took, |best| best.min(took)));
        (Self { best, in_vain }, in_vain >= FLUSHES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const STEP: Duration = Duration::from_millis(250);

    /// Copies a disk of `disk` MiB at `copy` MiB/s while the guest writes `write` MiB/s. Returns
    /// the seconds until help is needed, and the MiB left then.
    fn helped(disk: u64, copy: u64, write: u64) -> Option<(f64, u64)> {
        let mut catching = Catching::default();
        let (mut total, mut done) = (disk * MIB, 0);
        for step in 1..=2400 {
            done = (done + copy * MIB / 4).min(total);
            total += write * MIB / 4;
            let ready = done == total - write * MIB / 4;
            let sample = Sample { total_bytes: total, done_bytes: done, ready };
            let (next, help) = catching.next(sample, STEP);
            catching = next;
            if let Some(bytes_per_s) = help {
                assert!(bytes_per_s <= copy * MIB / 2 + MIB);
                return Some((f64::from(step) / 4.0, (total - done) / MIB));
            }
            if ready {
                return None;
            }
        }
        None
    }

    #[test]
    fn a_mirror_that_gains_is_left_alone_however_slowly() {
        assert_eq!(helped(20_000, 100, 0), None);
        assert_eq!(helped(20_000, 100, 60), None);
    }

    #[test]
    fn one_that_gains_nothing_is_helped_sooner_if_little_is_left() {
        let (much, left) = helped(10_000, 100, 100).unwrap();
        assert!((8.0..20.0).contains(&much) && left > 5_000, "{much} {left}");
        let (little, _) = helped(32, 100, 100).unwrap();
        assert!(little < 9.0, "{little}");
    }

    #[test]
    fn one_that_was_copied_once_and_falls_behind_is_helped_too() {
        let mut catching = Catching::default();
        let at = |second: u64, behind: u64| Sample {
            total_bytes: second * MIB + behind * MIB,
            done_bytes: second * MIB,
            ready: true,
        };
        assert!(catching.is_close(at(1, 1)) && !catching.is_close(at(1, 2)));
        for second in 0..60 {
            let (next, help) = catching.next(at(second, 0), Duration::from_secs(1));
            assert_eq!(help, None, "it keeps up");
            catching = next;
        }
        let helped = (60..70).any(|second| {
            let (next, help) = catching.next(at(second, 10), Duration::from_secs(1));
            catching = next;
            help.is_some()
        });
        assert!(helped);
    }

    #[test]
    fn a_vm_stops_once_flushes_are_short_or_get_no_shorter() {
        let flushes = |took: &[u64]| {
            let mut behind = Behind::default();
            let mut may_stop = Vec::new();
            for took in took {
                let (next, may) = behind.next(Duration::from_millis(*took));
                behind = next;
                may_stop.push(may);
            }
            may_stop
        };
        assert_eq!(flushes(&[5]), [true]);
        assert_eq!(flushes(&[4000, 1500, 300, 90]), [false, false, false, true]);
        assert_eq!(flushes(&[300, 290, 310, 280]), [false, false, false, true]);
        // It was fast, and lags behind again.
        assert_eq!(flushes(&[50, 2000, 50]), [true, false, true]);
    }
}
