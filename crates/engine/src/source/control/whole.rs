//! A stream that is passed through whole: its pace, and how fast the path takes it.
//!
//! It keeps to the operator's limit, as lanes do (`pacing`). Waiting for that counts as waiting for
//! the path: QEMU must not count on more.
//!
//! No batch of it is acknowledged, so the rate is that at which it is written. Most of the
//! time QEMU has less to send than the path could take, which says nothing about the path:
//! only what is written while the path makes the writer wait does.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use policy::switchover::Allowance;
use transport::Pacer;

/// A window has at least this length, and ends with bytes: on a slow path a piece takes
/// seconds.
const WINDOW_LEAST: Duration = Duration::from_millis(100);
/// The rate is the median of this many windows. So neither an outage counts nor what
/// filled the sockets' buffers.
const WINDOWS: usize = 9;
/// The path is full if the writer waits for at least this fraction of a window.
const FULL: f64 = 0.5;
/// For how long QEMU may go on with no more memory left than the downtime goal has room
/// for, before the report gives the reason.
const PATIENCE: Duration = Duration::from_secs(10);

/// The note for a QEMU that does. Before 11.1 it reports how much memory is left, and not
/// how much of its devices' state.
pub(crate) const DEVICES_WAIT: &str = "the VM is not stopped although its memory fits the \
                                       downtime goal: QEMU counts its devices' state, too. \
                                       Cancel the move, and allow a longer downtime \
                                       (--downtime-ms)";

/// Paces and counts what is written.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    writing: Mutex<Option<Writing>>,
    pacer: Pacer,
}

#[derive(Clone, Copy, Debug, Default)]
struct Writing {
    written: Written,
    /// When the write that has not ended began.
    since: Option<Instant>,
}

/// The bytes written so far, and the time that it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) busy: Duration,
}

impl Whole {
    /// Has `write` write all bytes, which may wait for the path, in pieces as its pace permits.
    pub(crate) fn write<E>(
        &self,
        mut bytes: &[u8],
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            self.writing.lock().get_or_insert_default().since = Some(Instant::now());
            let (piece, rest) = bytes.split_at(self.pacer.take(bytes.len()).min(bytes.len()));
            let outcome = write(piece);
            let mut writing = self.writing.lock();
            let Writing { written, since } = writing.get_or_insert_default();
            written.bytes += piece.len() as u64;
            written.busy += since.take().map_or(Duration::ZERO, |since| since.elapsed());
            drop(writing);
            outcome?;
            bytes = rest;
        }
        Ok(())
    }

    /// Sets its pace from now on; none: unpaced.
    pub(crate) fn set_pace(&self, bytes_per_s: Option<u64>) {
        self.pacer.set(bytes_per_s);
    }

    /// Ends its pace, and the wait for it: nothing is to be delivered any more.
    pub(crate) fn end_pace(&self) {
        self.pacer.stop();
    }

    /// What was written until now. None: the stream is split, as far as is known.
    pub(crate) fn written(&self) -> Option<Written> {
        let Writing { written, since } = (*self.writing.lock())?;
        let waits = since.map_or(Duration::ZERO, |since| since.elapsed());
        Some(Written { busy: written.busy + waits, ..written })
    }
}

/// The rate of such a stream.
#[derive(Debug, Default)]
pub(crate) struct Rate {
    seen: Written,
    window: Window,
    /// The bytes per second of the last windows in which the path was full.
    full: VecDeque<f64>,
    /// The most before the first of them.
    most: f64,
}

#[derive(Debug, Default)]
struct Window {
    elapsed: Duration,
    bytes: u64,
    busy: Duration,
}

impl Window {
    fn is_full(&self) -> bool {
        self.busy.as_secs_f64() >= self.elapsed.as_secs_f64() * FULL
    }
}

impl Rate {
    /// What was written by the last look.
    pub(crate) fn seen(&self) -> Written {
        self.seen
    }

    /// The rate after one more look. None: as before.
    pub(crate) fn next(&mut self, elapsed: Duration, written: Written) -> Option<f64> {
        let Self { seen, window, full, most } = self;
        window.elapsed += elapsed;
        window.bytes += written.bytes - seen.bytes;
        window.busy += written.busy.saturating_sub(seen.busy);
        *seen = written;
        if window.elapsed < WINDOW_LEAST || window.bytes == 0 && window.is_full() {
            return None;
        }
        let window = std::mem::take(window);
        let rate = window.bytes as f64 / window.elapsed.as_secs_f64();
        if window.is_full() {
            full.push_back(rate);
            if full.len() > WINDOWS {
                full.pop_front();
            }
            return Some(median(full));
        }
        // The path takes at least this.
        (full.is_empty() && rate > *most).then(|| {
            *most = rate;
            rate
        })
    }
}

/// The median of some rates, the lower one of two.
fn median(rates: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = rates.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

/// Notices that QEMU waits for other state than memory.
#[derive(Debug, Default)]
pub(crate) struct Patience(Duration);

impl Patience {
    /// Whether QEMU has gone on for long with no more memory left than it was `allowed` to
    /// leave.
    pub(crate) fn is_over(
        &mut self,
        allowed: Option<Allowance>,
        left_bytes: u64,
        elapsed: Duration,
    ) -> bool {
        let fits = allowed.is_some_and(|allowed| {
            left_bytes <= allowed.bytes_per_s.saturating_mul(allowed.downtime_ms) / 1000
        });
        self.0 = if fits { self.0.saturating_add(elapsed) } else { Duration::ZERO };
        self.0 >= PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(50);
    const MIB: u64 = 1 << 20;

    /// A rate, and what was written so far.
    #[derive(Default)]
    struct Measured {
        rate: Rate,
        written: Written,
        last: f64,
    }

    impl Measured {
        /// Looks `looks` times. Before each, the path took `bytes`, and the writer waited for
        /// `busy`.
        fn look(&mut self, looks: u32, bytes: u64, busy: Duration) -> f64 {
            for _ in 0..looks {
                self.written.bytes += bytes;
                self.written.busy += busy;
                self.last = self.rate.next(LOOK, self.written).unwrap_or(self.last);
            }
            self.last
        }
    }

    fn is_near(rate: f64, expected: f64) -> bool {
        (rate / expected - 1.0).abs() < 0.01
    }

    #[test]
    fn the_rate_is_not_that_of_filling_buffers() {
        let mut measured = Measured::default();
        let of_memory = measured.look(2, 8 * MIB, LOOK / 10);
        assert!(is_near(of_memory, (160 * MIB) as f64), "{of_memory}");
        let of_path = measured.look(20, MIB, LOOK);
        assert!(is_near(of_path, (20 * MIB) as f64), "{of_path}");
        // The buffers are empty again.
        measured.look(40, 0, Duration::ZERO);
        let later = measured.look(2, 8 * MIB, LOOK * 9 / 10);
        assert!(is_near(later, (20 * MIB) as f64), "{later}");
    }

    #[test]
    fn a_guest_that_writes_little_says_nothing_about_the_path() {
        let mut measured = Measured::default();
        let of_path = measured.look(20, MIB, LOOK);
        assert_eq!(measured.look(2000, 1000, LOOK / 1000), of_path);
        assert_eq!(measured.look(2000, 0, Duration::ZERO), of_path);
    }

    /// Otherwise QEMU would be allowed next to nothing for the rest of the move.
    #[test]
    fn an_outage_is_forgotten_and_a_slower_path_is_noticed() {
        let mut measured = Measured::default();
        let of_path = measured.look(20, MIB, LOOK);
        assert_eq!(measured.look(600, 0, LOOK), of_path);
        assert_eq!(measured.look(2, MIB, LOOK), of_path);
        let slower = measured.look(20, MIB / 10, LOOK);
        assert!(is_near(slower, (2 * MIB) as f64), "{slower}");
    }

    #[test]
    fn a_piece_that_takes_seconds_is_one_window() {
        let mut measured = Measured::default();
        for _ in 0..5 {
            measured.look(39, 0, LOOK);
            measured.look(1, MIB / 4, LOOK);
        }
        assert!(is_near(measured.last, (MIB / 8) as f64), "{}", measured.last);
    }

    #[test]
    fn a_path_that_is_never_full_has_the_most_that_it_took() {
        let mut measured = Measured::default();
        measured.look(2, 100 * MIB, LOOK / 4);
        let most = measured.look(20, MIB, LOOK / 100);
        assert!(is_near(most, (2000 * MIB) as f64), "{most}");
    }

    #[test]
    fn only_what_is_written_is_counted() {
        let whole = Whole::default();
        assert!(whole.written().is_none(), "the stream is split");
        let mut before = Written::default();
        let look = |_: &[u8]| {
            before = whole.written().unwrap();
            Ok::<(), u8>(())
        };
        assert_eq!(whole.write(&[0; 7], look), Ok(()));
        assert_eq!(before.bytes, 0);
        let after = whole.written().unwrap();
        assert_eq!(after.bytes, 7);
        assert!(after.busy >= before.busy, "{before:?} {after:?}");
        assert_eq!(whole.write(&[0; 3], |_| Err(5)), Err(5));
        assert_eq!(whole.written().unwrap().bytes, 10);
    }

    #[test]
    fn a_paced_stream_passes_in_order_and_in_pieces() {
        let (whole, bytes) = (Whole::default(), [1_u8, 2, 3].repeat(10_000));
        let pieces = || {
            let mut pieces = Vec::new();
            let keep = |piece: &[u8]| {
                pieces.push(piece.to_vec());
                Ok::<(), ()>(())
            };
            whole.write(&bytes, keep).unwrap();
            assert!(pieces.concat() == bytes);
            pieces
        };
        assert_eq!(pieces().len(), 1);
        // 5 ms at a time.
        whole.set_pace(Some(1_000_000));
        assert!(pieces().iter().all(|piece| piece.len() <= 5000));
        whole.end_pace();
        whole.set_pace(Some(1));
        assert_eq!(pieces().len(), 1, "it is over");
    }

    #[test]
    fn patience_ends_where_memory_fits_and_the_vm_is_not_stopped() {
        let allowed = Some(Allowance { bytes_per_s: 10_000_000, downtime_ms: 200 });
        let mut patience = Patience::default();
        let half = PATIENCE / 2;
        assert!(!patience.is_over(None, 0, PATIENCE));
        assert!(!patience.is_over(allowed, 2_000_000, half));
        assert!(!patience.is_over(allowed, 2_000_001, PATIENCE), "it has too much left");
        assert!(!patience.is_over(allowed, 0, half));
        assert!(patience.is_over(allowed, 0, half));
    }
}
