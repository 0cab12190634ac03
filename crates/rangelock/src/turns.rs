//! The range lock's state without its threads: held ranges and waiting
//! requests.

use std::ops::Range;

#[derive(Debug)]
struct Waiting<W> {
    range: Range<u64>,
    /// Ranges that overlap this one, were requested earlier, and are not yet
    /// given back.
    ahead: usize,
    waiter: W,
}

/// Held and requested ranges; `W` identifies the waiter.
#[derive(Debug)]
pub(crate) struct Turns<W> {
    /// They don't overlap, and their order has no meaning.
    held: Vec<Range<u64>>,
    waiting: Vec<Waiting<W>>,
    granted: Vec<W>,
}

impl<W> Turns<W> {
    pub(crate) const fn new() -> Self {
        Self { held: Vec::new(), waiting: Vec::new(), granted: Vec::new() }
    }

    /// Takes `range` if no part of it is held or waited for.
    pub(crate) fn take(&mut self, range: &Range<u64>) -> bool {
        let free = self.ahead_of(range) == 0;
        if free {
            self.held.push(range.clone());
        }
        free
    }

    /// Queues for `range`, which [`Turns::take`] just refused.
    pub(crate) fn wait(&mut self, range: Range<u64>, waiter: W) {
        let ahead = self.ahead_of(&range);
        debug_assert!(ahead > 0, "nothing is ahead, so nothing would end the wait");
        self.waiting.push(Waiting { range, ahead, waiter });
    }

    /// Gives `range` back, and grants the requests that waited for it last.
    ///
    /// A waiter that overlaps `range` requested later than its holder:
    /// otherwise the holder would still be waiting behind it. So each such
    /// waiter counted `range` once, and uncounts it here.
    pub(crate) fn give_back(&mut self, range: &Range<u64>) {
        let held = self.held.iter().position(|held| held == range);
        self.held.swap_remove(held.expect("it is held"));
        let mut at = 0;
        while let Some(waiting) = self.waiting.get_mut(at) {
            if overlap(&waiting.range, range) {
                waiting.ahead -= 1;
            }
            if waiting.ahead > 0 {
                at += 1;
                continue;
            }
            // The vector's order has no meaning; the counts have.
            let waiting = self.waiting.swap_remove(at);
            self.held.push(waiting.range);
            self.granted.push(waiting.waiter);
        }
    }

    /// A waiter whose range was granted and that has not been notified.
    pub(crate) fn granted(&mut self) -> Option<W> {
        self.granted.pop()
    }

    fn ahead_of(&self, range: &Range<u64>) -> usize {
        let held = self.held.iter().filter(|held| overlap(held, range)).count();
        let queued = self.waiting.iter().filter(|waiting| overlap(&waiting.range, range)).count();
        held + queued
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A naive model of a range lock: a queue in the order of requests, where a
    /// range is held if nothing before it overlaps.
    #[derive(Default)]
    struct Line(Vec<(usize, Range<u64>)>);

    impl Line {
        fn holders(&self) -> Vec<usize> {
            let is_free = |at: usize| {
                let (_, range) = &self.0[at];
                self.0[..at].iter().all(|(_, earlier)| !overlap(earlier, range))
            };
            let mut holders: Vec<_> =
                (0..self.0.len()).filter(|&at| is_free(at)).map(|at| self.0[at].0).collect();
            holders.sort_unstable();
            holders
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Lock(Range<u64>),
        TryLock(Range<u64>),
        GiveBack(prop::sample::Index),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..100_u64, 1..40_u64).prop_map(|(start, len)| start..start + len);
        let step = prop_oneof![
            3 => range().prop_map(Step::Lock),
            1 => range().prop_map(Step::TryLock),
            3 => any::<prop::sample::Index>().prop_map(Step::GiveBack),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn requests_are_granted_as_in_the_naive_model(steps in steps()) {
            let mut turns = Turns::new();
            let mut line = Line::default();
            let mut holders: Vec<usize> = Vec::new();
            for (who, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Lock(range) => {
                        line.0.push((who, range.clone()));
                        if turns.take(&range) {
                            holders.push(who);
                        } else {
                            turns.wait(range, who);
                        }
                    }
                    Step::TryLock(range) => {
                        let free = line.0.iter().all(|(_, other)| !overlap(other, &range));
                        prop_assert_eq!(turns.take(&range), free);
                        if free {
                            line.0.push((who, range));
                            holders.push(who);
                        }
                    }
                    Step::GiveBack(_) if holders.is_empty() => {}
                    Step::GiveBack(index) => {
                        let who = holders.swap_remove(index.index(holders.len()));
                        let at = line.0.iter().position(|(other, _)| *other == who).unwrap();
                        let (_, range) = line.0.remove(at);
                        turns.give_back(&range);
                        while let Some(who) = turns.granted() {
                            holders.push(who);
                        }
                    }
                }
                holders.sort_unstable();
                prop_assert_eq!(&holders, &line.holders());
            }
        }
    }
}
