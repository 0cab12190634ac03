//! Limits the rate of one lane, or of a stream that no lane carries.
//!
//! A token bucket fills at the pace and holds 10 ms worth of bytes. Half
//! of that is written at once, so a thread that wakes late finds the other half
//! and no time is lost, and never more than 10 ms worth passes at once. The
//! bucket's level follows from the clock alone, so late wake-ups don't add up.

use std::io::{self, IoSlice, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The bucket's capacity, as time: the most that passes at once.
const BURST: Duration = Duration::from_millis(10);
/// The size of one write, as time.
const PIECE: Duration = Duration::from_millis(5);
/// Slices in one paced write, for bodies of a batch that are not contiguous.
/// Even eight lanes at a gigabyte a second then write no more often than they
/// need.
const SLICES_MAX: usize = 32;
/// The rounding error allowed in sums, far below one byte.
const ROUNDING: f64 = 1e-3;

/// The bucket's arithmetic, without a clock.
#[derive(Debug, Default)]
struct Bucket {
    bytes_per_s: u64,
    level_bytes: f64,
    /// The time of that level, since some beginning.
    at: Duration,
    stopped: bool,
}

impl Bucket {
    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level_bytes += passed * self.bytes_per_s as f64;
        self.level_bytes = self.level_bytes.min(self.bytes_in(BURST));
    }

    /// At least one byte: otherwise a very slow lane would never write.
    fn bytes_in(&self, time: Duration) -> f64 {
        (self.bytes_per_s as f64 * time.as_secs_f64()).max(1.0)
    }

    /// How many of `wanted` bytes may be written now; otherwise the time of the
    /// next attempt.
    fn take(&mut self, now: Duration, wanted: usize) -> Result<usize, Duration> {
        self.fill(now);
        let piece = whole(self.bytes_in(PIECE)).min(wanted);
        let missing = piece as f64 - self.level_bytes;
        if missing > ROUNDING {
            let wait = missing / self.bytes_per_s.max(1) as f64;
            return Err(now + Duration::from_secs_f64(wait) + Duration::from_nanos(1));
        }
        self.level_bytes -= piece as f64;
        Ok(piece)
    }

    fn give_back(&mut self, bytes: usize) {
        self.level_bytes = (self.level_bytes + bytes as f64).min(self.bytes_in(BURST));
    }

    fn set_rate(&mut self, now: Duration, bytes_per_s: u64) {
        self.fill(now);
        if self.bytes_per_s == 0 {
            self.level_bytes = 0.0;
        }
        self.bytes_per_s = bytes_per_s;
        self.level_bytes = self.level_bytes.min(self.bytes_in(BURST));
    }
}

/// Delays the writes of one sender to keep its pace.
#[derive(Debug)]
pub struct Pacer {
    /// The bucket's rate, readable without its lock; 0 is unpaced.
    bytes_per_s: AtomicU64,
    bucket: Mutex<Bucket>,
    changed: Condvar,
    began: Instant,
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

impl Pacer {
    /// Creates a pacer without a pace.
    #[must_use]
    pub fn new() -> Self {
        Self {
            bytes_per_s: AtomicU64::new(0),
            bucket: Mutex::new(Bucket::default()),
            changed: Condvar::new(),
            began: Instant::now(),
        }
    }

    /// Sets the pace from now on, also for a waiting thread; none or 0:
    /// unpaced.
    pub fn set(&self, bytes_per_s: Option<u64>) {
        let mut bucket = self.bucket.lock();
        let rate = if bucket.stopped { 0 } else { bytes_per_s.unwrap_or(0) };
        bucket.set_rate(self.began.elapsed(), rate);
        self.bytes_per_s.store(rate, Relaxed);
        self.changed.notify_all();
    }

    /// Releases the waiting thread. Later calls of [`Pacer::set`] have no effect.
    pub fn stop(&self) {
        self.bucket.lock().stopped = true;
        self.set(None);
    }

    fn is_on(&self) -> bool {
        self.bytes_per_s.load(Relaxed) > 0
    }

    /// Waits until some of `wanted` bytes may be written; returns how many.
    #[must_use]
    pub fn take(&self, wanted: usize) -> usize {
        let mut bucket = self.bucket.lock();
        loop {
            if bucket.bytes_per_s == 0 {
                return wanted;
            }
            match bucket.take(self.began.elapsed(), wanted) {
                Ok(bytes) => return bytes,
                Err(at) => {
                    // However the wait ends, the bucket is tried again.
                    let _ = self.changed.wait_until(&mut bucket, self.began + at);
                }
            }
        }
    }

    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.bucket.lock().give_back(bytes);
        }
    }
}

/// A lane's socket, written at the lane's pace and counted.
pub(crate) struct Paced<'l, W> {
    pub(crate) inner: W,
    pub(crate) pacer: &'l Pacer,
    /// Bytes written, counted piece by piece: a batch on a slow lane takes
    /// longer than the interval between two reads of the counter.
    pub(crate) written: &'l AtomicU64,
}

impl<W: Write> Paced<'_, W> {
    fn write_piece(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let wanted = slices.iter().map(|slice| slice.len()).sum();
        let allowed = self.pacer.take(wanted);
        let mut piece = [IoSlice::new(&[]); SLICES_MAX];
        let (mut count, mut left) = (0, allowed);
        for (into, slice) in piece.iter_mut().zip(slices) {
            let now = slice.len().min(left);
            *into = IoSlice::new(&slice[..now]);
            count += 1;
            left -= now;
            if left == 0 {
                break;
            }
        }
        let written = self.inner.write_vectored(&piece[..count])?;
        self.pacer.give_back(allowed.saturating_sub(written));
        Ok(written)
    }
}

impl<W: Write> Write for Paced<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = if self.pacer.is_on() {
            self.write_piece(slices)?
        } else {
            self.inner.write_vectored(slices)?
        };
        self.written.fetch_add(written as u64, Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Whole bytes, which always fit the address space.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes: f64) -> usize {
    bytes as usize
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Writes in simulated time until `end`; each wait ends late by `late`.
    /// Returns the bytes that passed and when.
    fn simulate(
        bytes_per_s: u64,
        wanted: usize,
        end: Duration,
        mut late: impl FnMut() -> Duration,
    ) -> Vec<(Duration, usize)> {
        let mut bucket = Bucket::default();
        bucket.set_rate(Duration::ZERO, bytes_per_s);
        let (mut now, mut passed) = (Duration::ZERO, Vec::new());
        while now < end {
            match bucket.take(now, wanted) {
                Ok(bytes) => passed.push((now, bytes)),
                Err(at) => {
                    assert!(at > now, "a wait moves on");
                    now = at + late();
                }
            }
        }
        passed
    }

    /// The most bytes by which any stretch of time exceeded `bytes_per_s`.
    fn burst(passed: &[(Duration, usize)], bytes_per_s: u64) -> f64 {
        let (mut level, mut last, mut worst) = (0.0_f64, Duration::ZERO, 0.0_f64);
        for (at, bytes) in passed {
            level = (level - (*at - last).as_secs_f64() * bytes_per_s as f64).max(0.0);
            level += *bytes as f64;
            last = *at;
            worst = worst.max(level);
        }
        worst
    }

    proptest! {
        #[test]
        fn keeps_the_pace_despite_late_wake_ups_and_never_bursts(
            bytes_per_s in 1_000..10_000_000_000_u64,
            wanted in 1..600_000_usize,
            late_us in proptest::collection::vec(0..4_900_u64, 1..50),
        ) {
            let mut nth = 0;
            // Limits the number of steps at any pace.
            let end = Duration::from_secs_f64(20_000.0 * wanted as f64 / bytes_per_s as f64);
            let end = end.min(1000 * MS);
            let passed = simulate(bytes_per_s, wanted, end, || {
                nth += 1;
                Duration::from_micros(late_us[nth % late_us.len()])
            });
            let total: usize = passed.iter().map(|(_, bytes)| bytes).sum();
            let due = bytes_per_s as f64 * end.as_secs_f64();
            let burst_max = bytes_per_s as f64 * 0.010 + 1.0;
            prop_assert!(total as f64 <= due + burst_max, "{total} of {due}");
            prop_assert!(total as f64 >= due - 2.0 * burst_max, "{total} of {due}");
            prop_assert!(burst(&passed, bytes_per_s) <= burst_max + 1.0);
        }
    }

    #[test]
    fn unused_time_is_lost_except_for_ten_milliseconds() {
        let mut bucket = Bucket::default();
        bucket.set_rate(Duration::ZERO, 1_000_000);
        let mut at_once = 0;
        while let Ok(bytes) = bucket.take(60_000 * MS, 1 << 20) {
            at_once += bytes;
        }
        assert_eq!(at_once, 10_000);
    }

    #[test]
    fn a_new_pace_begins_empty_and_a_changed_one_keeps_what_fits() {
        let mut bucket = Bucket::default();
        bucket.set_rate(1000 * MS, 1_000_000);
        assert!(bucket.take(1000 * MS, 100).is_err());
        bucket.set_rate(1010 * MS, 10_000);
        let mut at_once = 0;
        while let Ok(bytes) = bucket.take(1010 * MS, 1 << 20) {
            at_once += bytes;
        }
        assert_eq!(at_once, 100);
        bucket.give_back(1000);
        assert!(bucket.level_bytes <= 100.0);
    }

    #[test]
    fn a_pace_below_a_byte_per_piece_still_moves() {
        let passed = simulate(3, 100, 10_000 * MS, || Duration::ZERO);
        let total: usize = passed.iter().map(|(_, bytes)| bytes).sum();
        assert!((28..=31).contains(&total), "{total}");
    }

    fn blocked(pacer: &Arc<Pacer>) -> thread::JoinHandle<usize> {
        pacer.set(Some(1));
        while pacer.bucket.lock().take(pacer.began.elapsed(), 1).is_ok() {}
        let pacer = Arc::clone(pacer);
        thread::spawn(move || (0..1000).map(|_| pacer.take(1000)).max().unwrap_or(0))
    }

    #[test]
    fn a_changed_pace_and_a_stop_reach_a_waiting_thread() {
        let pacer = Arc::new(Pacer::new());
        let waiting = blocked(&pacer);
        pacer.set(Some(1_000_000_000));
        assert_eq!(waiting.join().unwrap(), 1000);
        let waiting = blocked(&pacer);
        pacer.set(None);
        assert_eq!(waiting.join().unwrap(), 1000);
        let waiting = blocked(&pacer);
        pacer.stop();
        assert_eq!(waiting.join().unwrap(), 1000);
        pacer.set(Some(1));
        assert!(!pacer.is_on(), "stopped for good");
    }

    /// Accepts at most `at_most` bytes a call.
    struct Sink {
        bytes: Vec<u8>,
        largest: usize,
        at_most: usize,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write_vectored(&[IoSlice::new(bytes)])
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            let before = self.bytes.len();
            for slice in slices {
                let room = self.at_most - (self.bytes.len() - before);
                self.bytes.extend_from_slice(&slice[..slice.len().min(room)]);
            }
            let now = self.bytes.len() - before;
            self.largest = self.largest.max(now);
            Ok(now)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn all_bytes_pass_in_order_in_pieces_and_are_counted() {
        let content: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        for (rate, at_most) in [(None, 1 << 20), (Some(100_000_000), 1 << 20), (Some(1 << 30), 777)]
        {
            let pacer = Pacer::new();
            pacer.set(rate);
            let written = AtomicU64::new(0);
            let inner = Sink { bytes: Vec::new(), largest: 0, at_most };
            let mut paced = Paced { inner, pacer: &pacer, written: &written };
            let mut slices: Vec<_> = content.chunks(4096).map(IoSlice::new).collect();
            let mut slices = &mut slices[..];
            while !slices.is_empty() {
                let now = paced.write_vectored(slices).unwrap();
                IoSlice::advance_slices(&mut slices, now);
            }
            assert!(paced.inner.bytes == content);
            assert_eq!(written.load(Relaxed), content.len() as u64);
            let piece = rate.map_or(usize::MAX, |rate| usize::try_from(rate / 200).unwrap());
            assert!(paced.inner.largest <= piece, "{}", paced.inner.largest);
        }
    }
}
