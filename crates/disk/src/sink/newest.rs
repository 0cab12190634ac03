//! Which parts of a batch are still to be written, whatever the order of arrival.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::sequences::{Added, Sequences};

/// Ranges of batches that arrived ahead of an older one. As long as an older
/// batch can still arrive, it must not overwrite them.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    taken: Sequences,
    /// Ranges by their start. They don't overlap.
    ahead: BTreeMap<u64, Written>,
    /// With more ranges than this, those that no longer matter are removed.
    prune_above: usize,
}

#[derive(Clone, Copy, Debug)]
struct Written {
    end: u64,
    sequence: u64,
}

/// What to do with a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Write all of it.
    Whole,
    /// Write these parts of it, in ascending order; perhaps none.
    Parts(Vec<Range<u64>>),
    /// It arrived before.
    Again,
    /// Its number is further ahead than the protocol allows.
    TooFar,
}

impl Newest {
    /// Accepts the batch with that number and range.
    pub(crate) fn take(&mut self, sequence: u64, range: &Range<u64>) -> Taken {
        match self.taken.add(sequence) {
            Added::New => {}
            Added::Again => return Taken::Again,
            Added::TooFar => return Taken::TooFar,
        }
        let parts = self.not_newer(sequence, range);
        // Below `low`, all older batches have arrived: the range need not be noted.
        if sequence >= self.taken.low() {
            for part in &parts {
                self.note(sequence, part);
            }
        }
        self.prune();
        if parts.first() == Some(range) { Taken::Whole } else { Taken::Parts(parts) }
    }

    /// The noted ranges that overlap `range`, in ascending order.
    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, Written)> {
        let start = range.start;
        let before = self.ahead.range(..start).next_back();
        let reaches_in = before.filter(move |(_, written)| written.end > start);
        let within = self.ahead.range(range.clone());
        reaches_in.into_iter().chain(within).map(|(&start, &written)| (start, written))
    }

    /// The parts of `range` that no newer batch has covered.
    fn not_newer(&self, sequence: u64, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for (start, written) in self.overlapping(range) {
            if written.sequence > sequence {
                if start > at {
                    parts.push(at..start);
                }
                at = written.end;
            }
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
    }

    /// Notes a range; the noted ranges that it overlaps are older.
    fn note(&mut self, sequence: u64, range: &Range<u64>) {
        let older: Vec<_> = self.overlapping(range).collect();
        for (start, written) in older {
            self.ahead.remove(&start);
            if start < range.start {
                self.ahead.insert(start, Written { end: range.start, ..written });
            }
            if written.end > range.end {
                self.ahead.insert(range.end, written);
            }
        }
        self.ahead.insert(range.start, Written { end: range.end, sequence });
    }

    fn prune(&mut self) {
        if self.ahead.len() > self.prune_above {
            let low = self.taken.low();
            self.ahead.retain(|_, written| written.sequence >= low);
            // So the work per added range is constant on average.
            self.prune_above = 2 * self.ahead.len() + 64;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 64;

    proptest! {
        /// Numbered writes in any order, some twice, give the same disk as in the
        /// order of their numbers.
        #[test]
        fn any_order_makes_the_same_disk(
            writes in prop::collection::vec((0..BYTES, 1..24_usize), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 80),
            prune_above in prop::sample::select(vec![0_usize, 1000]),
        ) {
            let ranges: Vec<_> =
                writes.into_iter().map(|(start, len)| start..(start + len).min(BYTES)).collect();
            let mut wanted = [usize::MAX; BYTES];
            for (sequence, range) in ranges.iter().enumerate() {
                wanted[range.clone()].fill(sequence);
            }
            let mut newest = Newest { prune_above, ..Newest::default() };
            let mut disk = [usize::MAX; BYTES];
            let mut come = vec![false; ranges.len()];
            let order = order.iter().map(|index| index.index(ranges.len()));
            for sequence in order.chain(0..ranges.len()) {
                let range = ranges[sequence].start as u64..ranges[sequence].end as u64;
                let taken = newest.take(sequence as u64, &range);
                let first = !std::mem::replace(&mut come[sequence], true);
                prop_assert_eq!(taken == Taken::Again, !first);
                let parts = match taken {
                    Taken::Whole => vec![range; 1],
                    Taken::Parts(parts) => parts,
                    Taken::Again | Taken::TooFar => vec![],
                };
                for part in parts {
                    let part = part.start.try_into().unwrap()..part.end.try_into().unwrap();
                    disk[part].fill(sequence);
                }
                let mut last = 0;
                for (&start, written) in &newest.ahead {
                    prop_assert!(start >= last && start < written.end);
                    last = written.end;
                }
            }
            prop_assert_eq!(disk, wanted);
        }
    }

    #[test]
    fn in_order_nothing_is_noted() {
        let mut newest = Newest::default();
        for sequence in 0..1000 {
            assert_eq!(newest.take(sequence, &(0..512)), Taken::Whole);
            assert!(newest.ahead.is_empty());
        }
        assert_eq!(newest.take(1001, &(0..512)), Taken::Whole);
        assert_eq!(newest.ahead.len(), 1);
        assert_eq!(newest.take(1000, &(256..1024)), Taken::Parts(vec![512..1024; 1]));
    }

    #[test]
    fn ranges_are_forgotten_when_no_older_batch_can_arrive() {
        let mut newest = Newest::default();
        for round in 0..100 {
            let first = round * 200;
            for sequence in (first + 1..first + 200).chain([first]) {
                newest.take(sequence, &(sequence * 1024..sequence * 1024 + 512));
            }
        }
        assert!(newest.ahead.len() < 1000, "{}", newest.ahead.len());
    }
}
