//! A skip list of non-overlapping ranges, ordered by their start.
//!
//! Nodes are in one vector and refer to each other by index; freed nodes form a
//! free list. So nothing is allocated once the list has reached its greatest
//! length.

use std::ops::Range;

/// With one node in four reaching the next level, this is enough for some ten
/// thousand ranges; there are rarely more than threads.
const LEVELS: usize = 8;

/// An index that stands for no node: the end of a level, or its head.
const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Node {
    start: u64,
    end: u64,
    /// The next node on each level that this one reaches. The first entry of a
    /// free node is the next free one.
    next: [usize; LEVELS],
}

#[derive(Debug)]
pub(crate) struct SkipList {
    nodes: Vec<Node>,
    head: [usize; LEVELS],
    /// Levels above this one are empty.
    height: usize,
    free: usize,
    dice: u64,
}

impl SkipList {
    pub(crate) const fn new() -> Self {
        Self {
            nodes: Vec::new(),
            head: [NONE; LEVELS],
            height: 0,
            free: NONE,
            dice: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// The number of ranges in the list that overlap `range`.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> usize {
        let before = self.before(range.start)[0];
        let reaches_in = before != NONE && self.nodes[before].end > range.start;
        let mut count = usize::from(reaches_in);
        let mut at = self.next(before, 0);
        while at != NONE && self.nodes[at].start < range.end {
            count += 1;
            at = self.next(at, 0);
        }
        count
    }

    /// Inserts a non-empty range that overlaps none in the list.
    pub(crate) fn insert(&mut self, range: &Range<u64>) {
        debug_assert!(range.start < range.end, "an empty range is in no list");
        debug_assert!(self.overlapping(range) == 0, "{range:?} is taken");
        let before = self.before(range.start);
        let levels = self.roll();
        let mut next = [NONE; LEVELS];
        for (level, next) in next.iter_mut().enumerate().take(levels) {
            *next = self.next(before[level], level);
        }
        let at = self.fresh(Node { start: range.start, end: range.end, next });
        for (level, &before) in before.iter().enumerate().take(levels) {
            *self.link(before, level) = at;
        }
        self.height = self.height.max(levels);
    }

    /// Removes the range that starts at `start`.
    pub(crate) fn remove(&mut self, start: u64) {
        let before = self.before(start);
        let at = self.next(before[0], 0);
        assert!(at != NONE && self.nodes[at].start == start, "a range is removed once");
        for (level, &before) in before.iter().enumerate().take(self.height) {
            if self.next(before, level) == at {
                *self.link(before, level) = self.nodes[at].next[level];
            }
        }
        while self.height > 0 && self.head[self.height - 1] == NONE {
            self.height -= 1;
        }
        self.nodes[at].next[0] = self.free;
        self.free = at;
    }

    /// The last node before `start` on each level.
    fn before(&self, start: u64) -> [usize; LEVELS] {
        let mut before = [NONE; LEVELS];
        let mut at = NONE;
        for level in (0..self.height).rev() {
            let mut next = self.next(at, level);
            while next != NONE && self.nodes[next].start < start {
                at = next;
                next = self.next(at, level);
            }
            before[level] = at;
        }
        before
    }

    fn next(&self, at: usize, level: usize) -> usize {
        if at == NONE { self.head[level] } else { self.nodes[at].next[level] }
    }

    fn link(&mut self, at: usize, level: usize) -> &mut usize {
        if at == NONE { &mut self.head[level] } else { &mut self.nodes[at].next[level] }
    }

    fn fresh(&mut self, node: Node) -> usize {
        let at = self.free;
        if at == NONE {
            self.nodes.push(node);
            return self.nodes.len() - 1;
        }
        self.free = self.nodes[at].next[0];
        self.nodes[at] = node;
        at
    }

    /// The number of levels of the next node: one, and each further level with
    /// a probability of a quarter.
    fn roll(&mut self) -> usize {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (1 + self.dice.trailing_zeros() as usize / 2).min(LEVELS)
    }

    #[cfg(test)]
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = self.head[0];
        while at != NONE {
            ranges.push(self.nodes[at].start..self.nodes[at].end);
            at = self.nodes[at].next[0];
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn overlapping(model: &BTreeMap<u64, u64>, range: &Range<u64>) -> usize {
        model.iter().filter(|&(&start, &end)| start < range.end && range.start < end).count()
    }

    proptest! {
        #[test]
        fn agrees_with_a_sorted_map(
            steps in prop::collection::vec((0..1_000_u64, 1..60_u64, any::<bool>()), 1..400),
        ) {
            let (mut list, mut model) = (SkipList::new(), BTreeMap::new());
            let mut longest = 0;
            for (start, length, remove) in steps {
                let range = start..start + length;
                let count = overlapping(&model, &range);
                prop_assert_eq!(list.overlapping(&range), count);
                if remove {
                    if let Some((&start, _)) = model.range(start..).next() {
                        list.remove(start);
                        model.remove(&start);
                    }
                } else if count == 0 {
                    list.insert(&range);
                    model.insert(range.start, range.end);
                }
                longest = longest.max(model.len());
                let expected: Vec<_> = model.iter().map(|(&start, &end)| start..end).collect();
                prop_assert_eq!(list.ranges(), expected);
            }
            // Freed nodes are reused.
            prop_assert!(list.nodes.len() == longest);
        }
    }

    #[test]
    fn ranges_at_both_ends_of_u64_work() {
        let mut list = SkipList::new();
        list.insert(&(u64::MAX - 1..u64::MAX));
        list.insert(&(0..1));
        assert_eq!(list.overlapping(&(0..u64::MAX)), 2);
        assert_eq!(list.overlapping(&(1..u64::MAX - 1)), 0);
        list.remove(0);
        list.remove(u64::MAX - 1);
        assert_eq!(list.ranges(), []);
        assert_eq!(list.height, 0);
    }
}
