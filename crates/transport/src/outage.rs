//! One lane's time without a connection: how long it waits between tries, and
//! what of it is worth a word.

use std::time::Duration;

/// Between two tries to connect: at once the first time, then longer.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// Tries that have failed since the lane had a connection.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    failures: usize,
}

impl Outage {
    /// The connection is there. Says whether that ends an outage.
    pub(crate) fn ends(&mut self) -> bool {
        std::mem::take(&mut self.failures) > 0
    }

    /// The connection was lost, or could not be had. Says whether an outage
    /// begins with that, rather than go on, and how long to wait.
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
