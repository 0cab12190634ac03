//! The set of a disk's sequence numbers that have arrived, or are acknowledged.

use std::collections::VecDeque;

use wire::SEQUENCES_AHEAD_MAX;

/// A set of numbers: all below `low`, and some above it. The protocol bounds its size.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    low: u64,
    /// Whether `low`, `low + 1`, ... are in the set; `low` never is.
    above: VecDeque<bool>,
}

/// The result of adding a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    New,
    Again,
    /// Further ahead than the protocol allows.
    TooFar,
}

impl Sequences {
    /// The lowest number that is not in the set.
    pub(crate) fn low(&self) -> u64 {
        self.low
    }

    pub(crate) fn add(&mut self, sequence: u64) -> Added {
        let Some(ahead) = sequence.checked_sub(self.low) else { return Added::Again };
        if ahead >= SEQUENCES_AHEAD_MAX {
            return Added::TooFar;
        }
        let ahead = usize::try_from(ahead).unwrap_or(usize::MAX);
        if ahead >= self.above.len() {
            self.above.resize(ahead + 1, false);
        }
        if std::mem::replace(&mut self.above[ahead], true) {
            return Added::Again;
        }
        while self.above.front() == Some(&true) {
            self.above.pop_front();
            self.low += 1;
        }
        Added::New
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_set(numbers in prop::collection::vec(0..60_u64, 1..200)) {
            let (mut sequences, mut set) = (Sequences::default(), BTreeSet::new());
            for number in numbers {
                let wanted = if set.insert(number) { Added::New } else { Added::Again };
                prop_assert_eq!(sequences.add(number), wanted);
                let low = (0..).find(|number| !set.contains(number)).unwrap();
                prop_assert_eq!(sequences.low(), low);
            }
        }
    }

    #[test]
    fn numbers_too_far_ahead_are_refused() {
        let mut sequences = Sequences::default();
        assert_eq!(sequences.add(SEQUENCES_AHEAD_MAX), Added::TooFar);
        assert_eq!(sequences.add(u64::MAX), Added::TooFar);
        assert_eq!(sequences.add(SEQUENCES_AHEAD_MAX - 1), Added::New);
        assert_eq!(sequences.add(0), Added::New);
        assert_eq!(sequences.add(SEQUENCES_AHEAD_MAX), Added::New);
    }
}
