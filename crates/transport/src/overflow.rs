//! Limits a connection's data in flight when queues in the network overflow.
//!
//! The queue of a switch before a link that is slower than the NIC holds some
//! milliseconds. Congestion control may overfill it again and again (BBR ignores
//! losses altogether), and the excess is sent again, having crossed the network up to
//! there in vain. So a connection that loses much gets less in flight, down to what
//! its path holds without a queue, and more again when it loses nothing.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use host::nic::TcpCounts;
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};

/// Bytes between two checks. Losses come in pieces of up to 64 KiB, as the kernel
/// hands them to NICs.
const LOOK_EVERY_BYTES: u64 = 256 << 10;
/// Retransmitting more than a hundredth of the bytes sent is much; less than a
/// two-hundredth is nothing.
const MUCH: u64 = 100;
const NOTHING: u64 = 200;
/// A bound grows by one part in this many at each check.
const GROWTH: u64 = 32;
/// Less in flight would leave the connection idle.
const LEAST_BYTES: u64 = 64 << 10;

/// A connection's losses, and its bound on data in flight.
#[derive(Debug, Default)]
pub struct Overflow {
    written: u64,
    last: TcpCounts,
    bound: Option<u64>,
}

impl Overflow {
    /// Notes bytes written to the connection.
    pub fn wrote(&mut self, socket: BorrowedFd<'_>, bytes: u64) {
        self.written += bytes;
        if self.written < LOOK_EVERY_BYTES {
            return;
        }
        self.written = 0;
        // Without counters or a bound the connection stays as it is.
        let Ok(counts) = TcpCounts::of(socket) else { return };
        if let Some(bound) = self.next(counts) {
            // The kernel doubles the size, and uses half of it for its own overhead.
            let bytes = usize::try_from(bound / 2).unwrap_or(usize::MAX);
            if set_socket_send_buffer_size_force(socket, bytes).is_err() {
                let _ = set_socket_send_buffer_size(socket, bytes);
            }
        }
    }

    /// The connection's round trip as of the last check; none before the first.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.last.round_trip
    }

    /// For how long the connection's peer had no room, as of the last check.
    #[must_use]
    pub fn peer_full(&self) -> Duration {
        self.last.peer_full
    }

    /// The new bound, if it changes.
    fn next(&mut self, counts: TcpCounts) -> Option<u64> {
        let sent = counts.sent_bytes.saturating_sub(self.last.sent_bytes);
        let again = counts.again_bytes.saturating_sub(self.last.again_bytes);
        self.last = counts;
        let bound = if again > sent / MUCH {
            // A bound that is far from being reached doesn't count.
            let now =
                self.bound.map_or(counts.flying_bytes, |bound| bound.min(2 * counts.flying_bytes));
            (now / 2).max(counts.path_bytes).max(LEAST_BYTES)
        } else if again < sent / NOTHING {
            let now = self.bound.filter(|bound| *bound <= 2 * counts.flying_bytes)?;
            now + now / GROWTH
        } else {
            return None;
        };
        self.bound = Some(bound);
        Some(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue before a slow link: bytes in flight beyond what fits are lost and sent
    /// again. Returns the bytes in flight and lost at each check.
    fn through_a_queue(fits: u64, looks: usize) -> Vec<(u64, u64)> {
        let (mut overflow, mut counts) = (Overflow::default(), TcpCounts::default());
        let (mut flying, mut seen) = (4 << 20, Vec::new());
        for _ in 0..looks {
            let lost = LOOK_EVERY_BYTES * u64::saturating_sub(flying, fits) / flying;
            counts.sent_bytes += LOOK_EVERY_BYTES + lost;
            counts.again_bytes += lost;
            counts.flying_bytes = flying;
            flying = overflow.next(counts).unwrap_or(flying);
            seen.push((flying, lost));
        }
        seen
    }

    #[test]
    fn a_connection_that_fills_a_queue_keeps_half_of_it_full_and_loses_little() {
        for fits in [100 << 10, 600 << 10, 3 << 20] {
            let seen = through_a_queue(fits, 200);
            let settled = &seen[50..];
            assert!(settled.iter().all(|(flying, _)| *flying >= fits / 2), "{seen:?}");
            let lost: u64 = settled.iter().map(|(_, lost)| lost).sum();
            assert!(lost < LOOK_EVERY_BYTES * settled.len() as u64 / 100, "{fits}: {seen:?}");
        }
    }

    /// Loses a tenth of the bytes sent.
    fn loses(counts: &mut TcpCounts) -> TcpCounts {
        counts.sent_bytes += 1000;
        counts.again_bytes += 100;
        *counts
    }

    #[test]
    fn a_connection_that_always_loses_keeps_its_path_full() {
        for (path_bytes, expected) in [(1 << 20, 1 << 20), (0, LEAST_BYTES)] {
            let mut overflow = Overflow::default();
            let mut counts =
                TcpCounts { flying_bytes: 4 << 20, path_bytes, ..TcpCounts::default() };
            for _ in 0..50 {
                counts.flying_bytes = overflow.next(loses(&mut counts)).unwrap();
            }
            assert_eq!(counts.flying_bytes, expected);
        }
    }

    #[test]
    fn a_connection_that_loses_nothing_is_not_bounded() {
        let mut overflow = Overflow::default();
        let mut counts = TcpCounts { flying_bytes: 4 << 20, ..TcpCounts::default() };
        for again_bytes in [0, 4, 0, 10, 0] {
            counts.sent_bytes += 1000;
            counts.again_bytes += again_bytes;
            assert_eq!(overflow.next(counts), None);
        }
    }

    #[test]
    fn a_bound_that_is_not_reached_does_not_grow() {
        let mut overflow = Overflow::default();
        let mut counts = TcpCounts { flying_bytes: 4 << 20, ..TcpCounts::default() };
        let bound = overflow.next(loses(&mut counts)).unwrap();
        assert_eq!(bound, 2 << 20);
        for (flying_bytes, expected) in [(bound, Some(bound + bound / GROWTH)), (100_000, None)] {
            counts.sent_bytes += 1000;
            counts.flying_bytes = flying_bytes;
            assert_eq!(overflow.next(counts), expected);
        }
        // After a loss the bound follows what was actually in flight.
        assert_eq!(overflow.next(loses(&mut counts)), Some(100_000));
    }
}
