//! A lane's time without a connection that delivers: the pauses between attempts, and which
//! events are worth a log line.
//!
//! A connection can be made again and again and deliver nothing: a network that loses full packets
//! lets the short ones of a handshake pass. Each such connection holds batches until it breaks,
//! which may be when the VM stands still. So such a lane rests while others carry its batches.

use std::time::Duration;

/// Pauses between connection attempts: short the first time, then longer.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// A lane rests that long after its second connection in vain in a row, and twice as long after
/// each further one, up to this.
const REST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(64);

/// How a lane comes to have no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It could not connect.
    NoConnection,
    /// It lost a connection that had delivered something, or had nothing to deliver.
    Lost,
    /// It lost a connection before anything sent on it had arrived.
    InVain,
}

/// How long a lane waits until it connects again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    /// While no lane has a connection.
    pub(crate) alone: Duration,
    /// While another lane has one.
    pub(crate) beside_others: Duration,
}

/// Failures since the last connection that delivered.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    failures: usize,
    /// Connections in vain.
    in_vain: u32,
}

impl Outage {
    /// Whether a new connection seems to end an outage. Two in vain say that the next may be, too.
    pub(crate) fn seems_over(&self) -> bool {
        self.failures > 0 && self.in_vain < 2
    }

    /// Notes a failure; returns whether it is news, and how long to wait.
    pub(crate) fn fails(&mut self, failure: Failure) -> (bool, Pause) {
        match failure {
            Failure::NoConnection => {}
            Failure::Lost => *self = Self::default(),
            Failure::InVain => {
                self.in_vain += 1;
                self.failures = self.failures.min(1);
            }
        }
        let alone = PAUSES[usize::min(self.failures, PAUSES.len() - 1)];
        self.failures += 1;
        let is_news = self.failures == 1 || failure == Failure::InVain && self.in_vain == 2;
        (is_news, Pause { alone, beside_others: alone.max(self.rest()) })
    }

    fn rest(&self) -> Duration {
        let Some(doublings) = self.in_vain.checked_sub(2) else { return Duration::ZERO };
        REST.saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(REST_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_begins_and_ends_once_however_many_tries_it_takes() {
        let mut outage = Outage::default();
        assert!(!outage.seems_over(), "the first connection ends nothing");
        for first in [Failure::NoConnection, Failure::Lost] {
            let tries = [first].into_iter().chain([Failure::NoConnection; 5]);
            let fails: Vec<_> = tries.map(|failure| outage.fails(failure)).collect();
            assert!(fails[0].0 && fails[1..].iter().all(|(is_news, _)| !is_news));
            assert!(fails.is_sorted_by_key(|(_, pause)| pause.alone));
            assert!(fails.iter().all(|(_, pause)| pause.alone == pause.beside_others));
            assert!(outage.seems_over());
        }
    }

    #[test]
    fn a_lane_whose_connections_deliver_nothing_rests_beside_others() {
        let mut outage = Outage::default();
        let mut fails = vec![outage.fails(Failure::InVain)];
        assert!(outage.seems_over(), "a card that fails can take with it all that was sent");
        fails.extend((1..40).map(|_| outage.fails(Failure::InVain)));
        let news: Vec<_> = (0..40).filter(|nth| fails[*nth].0).collect();
        assert_eq!(news, [0, 1], "that it broke, and that this was not the last time");
        let rests: Vec<u64> =
            fails.iter().map(|(_, pause)| pause.beside_others.as_secs()).take(8).collect();
        assert_eq!(rests, [0, 2, 4, 8, 16, 32, 64, 64]);
        assert_eq!(fails[39].1.beside_others, REST_MAX);
        // Alone it continues trying, and a connection that is made is no new outage.
        assert!(fails.iter().all(|(_, pause)| pause.alone <= PAUSES[1]));
        assert!(!outage.seems_over());
        // One that delivered ends all that.
        let (is_news, pause) = outage.fails(Failure::Lost);
        assert_eq!((is_news, pause.alone, pause.beside_others), (true, PAUSES[0], PAUSES[0]));
    }
}
