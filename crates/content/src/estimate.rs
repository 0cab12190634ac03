//! Estimates what a migration would share, from samples of VMs' content.
//!
//! A content is in every sample or in none, depending on its name alone. So what two samples have
//! in common shows what the VMs have in common. A sample of pages would not.

use std::collections::HashMap;

/// A VM's content, or a part of it: the first 32 bits of names, one for each page. The index
/// knows no more of names, and it is enough for counting: of 16 GiB of pages that have nothing in
/// common with a host of 256 GiB, one in 64 seems to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The sample has one in so many contents.
    pub one_in: u32,
    /// Their hints, in no order.
    pub hints: Vec<u32>,
}

impl Sample {
    /// A sample of one in `one_in` of these.
    pub(crate) fn of(hints: impl Iterator<Item = u32>, one_in: u32) -> Self {
        let one_in = one_in.max(1);
        let last = u32::MAX / one_in;
        Self { one_in, hints: hints.filter(|hint| *hint <= last).collect() }
    }

    /// A coarser sample of the same: one in `one_in`. A sample that is no finer stays as it is.
    #[must_use]
    pub fn thinned(self, one_in: u32) -> Self {
        if one_in <= self.one_in { self } else { Self::of(self.hints.into_iter(), one_in) }
    }
}

/// How the pages of a VM, or of several, would be sent: numbers of pages, from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Pages with content.
    pub pages: u64,
    /// Of these, pages that the destination has.
    pub held: u64,
    /// Of the rest, pages that equal another page of the same VM.
    pub within: u64,
    /// Of the rest, pages that equal one of a VM of the gang that was counted before.
    pub common: u64,
}

impl Estimate {
    /// The same proportions for a known number of pages. A sample's own number is subject to
    /// chance, the more so if one content fills many pages: it is sampled with all of them, or
    /// with none.
    #[must_use]
    pub fn of_pages(self, pages: u64) -> Self {
        let share = |part: u64| {
            let part = u128::from(part) * u128::from(pages) / u128::from(self.pages.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let (held, within, common) = (share(self.held), share(self.within), share(self.common));
        Self { pages, held, within, common }
    }
}

/// Counts the VMs of a gang that move to where content is shared: a host, or a rack. Content that
/// several have is sent as a body once.
#[derive(Debug, Default)]
pub struct Tally {
    /// Which VM is the first with each content.
    brought: HashMap<u32, usize>,
    counted: usize,
}

impl Tally {
    /// Counts one more VM from its sample. `held` tells which content its destination has. All
    /// samples must have the same `one_in`.
    pub fn add(&mut self, sample: &Sample, held: impl Fn(u32) -> bool) -> Estimate {
        self.counted += 1;
        let each = u64::from(sample.one_in);
        let mut estimate = Estimate::default();
        for hint in &sample.hints {
            estimate.pages += each;
            if held(*hint) {
                estimate.held += each;
                continue;
            }
            match self.brought.get(hint) {
                Some(vm) if *vm == self.counted => estimate.within += each,
                Some(_) => estimate.common += each,
                None => {
                    self.brought.insert(*hint, self.counted);
                }
            }
        }
        estimate
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Evenly spread, as names are.
    fn hint(content: u32) -> u32 {
        let mixed = content.wrapping_mul(0x9e37_79b1);
        (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca77)
    }

    fn sample(contents: impl IntoIterator<Item = u32>, one_in: u32) -> Sample {
        Sample::of(contents.into_iter().map(hint), one_in)
    }

    #[test]
    fn a_sample_made_coarser_is_the_coarser_one() {
        let fine = sample(0..10_000, 3);
        assert_eq!(fine.clone().thinned(7), sample(0..10_000, 7));
        assert_eq!(fine.clone().thinned(2), fine);
    }

    #[test]
    fn a_complete_sample_gives_exact_counts() {
        let held: HashSet<u32> = [1, 2, 3].map(hint).into();
        let held = |hint: u32| held.contains(&hint);
        let mut tally = Tally::default();
        let estimate = |pages, held, within, common| Estimate { pages, held, within, common };
        let first = tally.add(&sample([1, 2, 2, 7, 7, 7, 8], 1), held);
        assert_eq!(first, estimate(7, 3, 2, 0));
        let second = tally.add(&sample([3, 7, 7, 9, 9], 1), held);
        assert_eq!(second, estimate(5, 1, 1, 2));
        assert_eq!(tally.add(&sample([], 1), held), Estimate::default());
        let known = Estimate { pages: 49, held: 21, within: 14, common: 0 };
        assert_eq!(first.of_pages(49), known);
        assert_eq!(Estimate::default().of_pages(9), estimate(9, 0, 0, 0));
    }

    #[test]
    fn a_sample_estimates_all_pages() {
        const PAGES: u32 = 200_000;
        const ONE_IN: u32 = 64;
        let near = |estimate: u64, pages: u32| {
            let pages = f64::from(pages);
            // Four standard deviations.
            (estimate as f64 - pages).abs() < 4.0 * (pages * f64::from(ONE_IN - 1)).sqrt()
        };
        // The first VM has three quarters of the second one's content.
        let mut tally = Tally::default();
        let first = tally.add(&sample(0..PAGES, ONE_IN), |_| false);
        assert!(near(first.pages, PAGES), "{first:?}");
        assert_eq!((first.held, first.within, first.common), (0, 0, 0));
        let second = tally.add(&sample(PAGES / 4..PAGES / 4 * 5, ONE_IN), |_| false);
        assert!(near(second.common, PAGES / 4 * 3), "{second:?}");
        assert_eq!((second.held, second.within), (0, 0));
        assert!(near(second.pages - second.common, PAGES / 4), "{second:?}");
    }
}
