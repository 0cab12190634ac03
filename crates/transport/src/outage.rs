//! A lane's time without a connection: the pauses between attempts, and which
//! events are worth a log line.

use std::time::Duration;

/// Pauses between connection attempts: short the first time, then longer.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// Failed attempts since the last connection.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    failures: usize,
}

impl Outage {
    /// Notes a connection; returns whether it ends an outage.
    pub(crate) fn ends(&mut self) -> bool {
        std::mem::take(&mut self.failures) > 0
    }

    /// Notes a lost connection or a failed attempt; returns whether an outage
    /// begins with it, and how long to wait.
    pub(crate) fn fails(&mut self) -> (bool, Duration) {
        let pause = PAUSES[usize::min(self.failures, PAUSES.len() - 1)];
        self.failures += 1;
        (self.failures == 1, pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_begins_and_ends_once_however_many_tries_it_takes() {
        let mut outage = Outage::default();
        assert!(!outage.ends(), "the first connection ends nothing");
        for _ in 0..2 {
            let fails: Vec<_> = (0..6).map(|_| outage.fails()).collect();
            assert!(fails[0].0 && fails[1..].iter().all(|(begins, _)| !begins));
            assert!(fails.is_sorted_by_key(|(_, pause)| *pause));
            assert!(outage.ends() && !outage.ends());
        }
    }
}
