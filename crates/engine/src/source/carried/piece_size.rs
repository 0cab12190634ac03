//! How large the pieces of a relayed stream are.
//!
//! The destination has room for a few pieces, so their size bounds what a long path delivers. But
//! QEMU counts bytes as delivered once they are read, and stops the VM when little is left: so
//! pieces are small where the path holds little.

use std::time::Duration;

use page::BLOCK_BYTES_MAX;
use policy::switchover::path_bytes;

/// Bytes of the smallest pieces.
pub(super) const LEAST_BYTES: usize = 64 << 10;
/// Pieces in flight at most: the destination has room for 16, and reports more in fours.
const IN_FLIGHT_MAX: usize = 12;
/// Buffers in addition to those in flight: one that is being filled, and one that waits for a lane.
const BESIDE: usize = 2;
/// The rate is measured over this time at least, because acknowledgements come in bursts.
const LOOK_LEAST: Duration = Duration::from_millis(200);
/// What is left of the best rate after each look. QEMU may have had little to send.
const FADES: f64 = 0.8;

/// The pieces of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Bytes of the largest.
    pub(super) bytes: usize,
    /// How many may have a buffer.
    pub(super) buffers: usize,
}

/// Fits the pieces to the path.
#[derive(Debug)]
pub(super) struct Fitting {
    lanes: usize,
    elapsed: Duration,
    delivered_bytes: u64,
    /// The best rate, in bytes per second.
    fastest: f64,
    pieces: Pieces,
}

impl Fitting {
    /// For so many lanes, and with these pieces to begin with.
    pub(super) fn new(lanes: usize) -> Self {
        let pieces = Pieces { bytes: LEAST_BYTES, buffers: buffers_least(lanes) };
        Self { lanes, elapsed: Duration::ZERO, delivered_bytes: 0, fastest: 0.0, pieces }
    }

    /// The pieces from now on, after `elapsed` more in which so many bytes were delivered; none: as
    /// before.
    pub(super) fn next(
        &mut self,
        elapsed: Duration,
        delivered_bytes: u64,
        round_trip: Duration,
    ) -> Option<Pieces> {
        self.elapsed += elapsed;
        self.delivered_bytes += delivered_bytes;
        if self.elapsed < LOOK_LEAST.max(round_trip) {
            return None;
        }
        let rate = self.delivered_bytes as f64 / self.elapsed.as_secs_f64();
        (self.elapsed, self.delivered_bytes) = (Duration::ZERO, 0);
        self.fastest = rate.max(self.fastest * FADES);
        let writing_bytes = (self.lanes * self.pieces.bytes) as u64;
        let pieces = pieces(self.lanes, path_bytes(self.fastest, round_trip, writing_bytes));
        let is_new = std::mem::replace(&mut self.pieces, pieces) != pieces;
        is_new.then_some(pieces)
    }
}

/// Two for each lane, and two that wait.
pub(super) fn buffers_least(lanes: usize) -> usize {
    2 * lanes + 2
}

/// The pieces that keep a path full if it needs `path_bytes` in flight: more of them first, and
/// then larger ones.
fn pieces(lanes: usize, path_bytes: u64) -> Pieces {
    let path_bytes = usize::try_from(path_bytes).unwrap_or(usize::MAX);
    let least = buffers_least(lanes);
    let most = least.max(IN_FLIGHT_MAX + BESIDE);
    let buffers = (path_bytes / LEAST_BYTES + BESIDE).clamp(least, most);
    let in_flight = (buffers - BESIDE).clamp(1, IN_FLIGHT_MAX);
    Pieces { bytes: (path_bytes / in_flight).clamp(LEAST_BYTES, BLOCK_BYTES_MAX), buffers }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is delivered in the end per second, and by what pieces, if QEMU always has more.
    fn settles(link: u64, round_trip_us: u64, lanes: usize) -> (u64, Pieces) {
        let (mut fitting, second) = (Fitting::new(lanes), Duration::from_secs(1));
        let (mut pieces, mut rate) = (fitting.pieces, 0);
        for _ in 0..40 {
            let in_flight = (pieces.buffers - BESIDE).min(IN_FLIGHT_MAX) * pieces.bytes;
            rate = link.min(in_flight as u64 * 1_000_000 / round_trip_us);
            let next = fitting.next(second, rate, Duration::from_micros(round_trip_us));
            pieces = next.unwrap_or(pieces);
        }
        (rate, pieces)
    }

    #[test]
    fn pieces_keep_a_long_path_full() {
        for lanes in [1, 2, 8] {
            for (mb_per_s, round_trip_ms) in [(119, 10), (119, 30), (119, 50), (1190, 5)] {
                let link = mb_per_s * 1_000_000;
                let (rate, pieces) = settles(link, round_trip_ms * 1000, lanes);
                assert_eq!(rate, link, "{lanes} {round_trip_ms} ms: {pieces:?}");
            }
            // As far as there is room.
            assert_eq!(settles(1_190_000_000, 100_000, lanes).1.bytes, BLOCK_BYTES_MAX);
        }
    }

    #[test]
    fn pieces_stay_small_where_the_path_holds_little() {
        for lanes in [1, 2, 8] {
            let least = Pieces { bytes: LEAST_BYTES, buffers: buffers_least(lanes) };
            for (kb_per_s, round_trip_us) in [(119_000, 200), (12_000, 2_000), (119, 100_000)] {
                let (_, pieces) = settles(kb_per_s * 1000, round_trip_us, lanes);
                assert_eq!(pieces, least, "{lanes} {kb_per_s} {round_trip_us}");
            }
        }
    }

    #[test]
    fn a_path_that_becomes_slow_gets_smaller_pieces() {
        let (mut fitting, round_trip) = (Fitting::new(8), Duration::from_millis(50));
        let mut look = |bytes| fitting.next(LOOK_LEAST / 2, bytes, round_trip);
        assert_eq!(look(10_000_000), None, "too soon");
        let large = look(10_000_000).unwrap();
        assert!(large.bytes > 4 * LEAST_BYTES, "{large:?}");
        let later: Vec<_> = (0..60).filter_map(|_| look(10_000)).collect();
        assert!(later.is_sorted_by_key(|pieces| std::cmp::Reverse(pieces.bytes)), "{later:?}");
        assert_eq!(later.last().unwrap().bytes, LEAST_BYTES);
    }
}
