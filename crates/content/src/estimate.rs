//! What a migration would share, from a sample of names.
//!
//! One in [`SAMPLED_ONE_IN`] names is in every sample, or in none: which ones
//! depends on the name alone. So what two samples have in common tells what the
//! VMs have in common, which a sample of pages would not.

use std::collections::HashMap;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use crate::Name;

/// One in so many names is sampled.
pub const SAMPLED_ONE_IN: u64 = 64;

impl Name {
    /// Whether this is one of those that samples are made of.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.prefix() <= u64::MAX / SAMPLED_ONE_IN
    }
}

/// What the pages of a VM, or of several, would go as: numbers of pages, from a
/// sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Pages with content.
    pub pages: u64,
    /// Of these, those that are at the destination.
    pub held: u64,
    /// Of the rest, those that another page of the same VM brings.
    pub within: u64,
    /// Of the rest, those that a VM of the gang brings which was counted before.
    pub common: u64,
}

impl Estimate {
    /// Pages that would go as bodies.
    #[must_use]
    pub fn bodies(&self) -> u64 {
        self.pages.saturating_sub(self.held + self.within + self.common)
    }

    /// The same shares of a number of pages that is known. A sample has it by
    /// chance, the more so where one content fills many pages: it is sampled with
    /// all of them, or with none.
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

impl Add for Estimate {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            pages: self.pages + other.pages,
            held: self.held + other.held,
            within: self.within + other.within,
            common: self.common + other.common,
        }
    }
}

impl AddAssign for Estimate {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Estimate {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// Counts the VMs of a gang that go to where content is shared: a host, or a
/// rack. Content that several have is a body once.
#[derive(Debug, Default)]
pub struct Tally {
    /// Which VM brings what.
    brought: HashMap<Name, usize>,
    counted: usize,
}

impl Tally {
    /// Nobody counted yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one more VM, from its sample, where `held` says what is at its
    /// destination.
    pub fn add(&mut self, sample: &[Name], held: impl Fn(&Name) -> bool) -> Estimate {
        self.counted += 1;
        let mut estimate = Estimate::default();
        for name in sample {
            estimate.pages += SAMPLED_ONE_IN;
            if held(name) {
                estimate.held += SAMPLED_ONE_IN;
                continue;
            }
            match self.brought.get(name) {
                Some(vm) if *vm == self.counted => estimate.within += SAMPLED_ONE_IN,
                Some(_) => estimate.common += SAMPLED_ONE_IN,
                None => {
                    self.brought.insert(*name, self.counted);
                }
            }
        }
        estimate
    }
}

/// What one VM would share that goes by itself.
#[must_use]
pub fn shared(sample: &[Name], held: impl Fn(&Name) -> bool) -> Estimate {
    Tally::new().add(sample, held)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{Domain, Key};

    fn names(contents: impl IntoIterator<Item = u32>) -> Vec<Name> {
        let key = Key::new(b"secret", &Domain::default());
        contents.into_iter().map(|content| key.name(&content.to_le_bytes())).collect()
    }

    fn sample(contents: impl IntoIterator<Item = u32>) -> Vec<Name> {
        names(contents).into_iter().filter(Name::is_sampled).collect()
    }

    #[test]
    fn of_known_names_the_counts_are_exact() {
        let held: HashSet<Name> = names([1, 2, 3]).into_iter().collect();
        let held = |name: &Name| held.contains(name);
        let mut tally = Tally::new();
        let estimate = |pages, held, within, common| Estimate {
            pages: pages * SAMPLED_ONE_IN,
            held: held * SAMPLED_ONE_IN,
            within: within * SAMPLED_ONE_IN,
            common: common * SAMPLED_ONE_IN,
        };
        let first = tally.add(&names([1, 2, 2, 7, 7, 7, 8]), held);
        assert_eq!(first, estimate(7, 3, 2, 0));
        assert_eq!(first.bodies(), 2 * SAMPLED_ONE_IN);
        let second = tally.add(&names([3, 7, 7, 9, 9]), held);
        assert_eq!(second, estimate(5, 1, 1, 2));
        assert_eq!(second.bodies(), SAMPLED_ONE_IN);
        let sum: Estimate = [first, second].into_iter().sum();
        assert_eq!(sum, estimate(12, 4, 3, 2));
        assert_eq!(tally.add(&[], held), Estimate::default());
        assert_eq!(shared(&names([7, 7]), |_| false), estimate(2, 0, 1, 0));
        let known = Estimate { pages: 49, held: 21, within: 14, common: 0 };
        assert_eq!(first.of_pages(49), known);
        assert_eq!(Estimate::default().of_pages(9).bodies(), 9);
    }

    #[test]
    fn a_sample_tells_what_all_the_pages_would() {
        const PAGES: u32 = 200_000;
        // Three quarters of the second VM are the first one's.
        let first = shared(&sample(0..PAGES), |_| false);
        let near = |estimate: u64, pages: u32| {
            let pages = f64::from(pages);
            // Four standard deviations; what is sampled follows from the key.
            (estimate as f64 - pages).abs() < 4.0 * (pages * 63.0).sqrt()
        };
        assert!(near(first.pages, PAGES), "{first:?}");
        let mut tally = Tally::new();
        tally.add(&sample(0..PAGES), |_| false);
        let second = tally.add(&sample(PAGES / 4..PAGES / 4 * 5), |_| false);
        assert!(near(second.common, PAGES / 4 * 3), "{second:?}");
        assert!(near(second.bodies(), PAGES / 4), "{second:?}");
    }
}
