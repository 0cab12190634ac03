//! Which areas a guest's memory has, by its orders.

use crate::PAGE_BYTES;
use crate::content::Kind;
use crate::orders::Orders;

/// Common content is numbered apart from each guest's own.
const COMMON_FIRST_PAGE: u64 = 1 << 31;

/// An area to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its name in reports of wrong pages.
    pub name: &'static str,
    /// What it is filled with.
    pub kind: Kind,
    /// Makes its content different from that of other guests.
    pub seed: u64,
    /// The number of its first page, unique in the guest.
    pub first_page: u64,
    /// Pages in it.
    pub pages: usize,
}

/// All areas of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plans {
    /// The areas that are filled once.
    pub fixed: [Plan; 5],
    /// The area that is rewritten.
    pub working_set: Plan,
}

impl Plans {
    /// The areas that these orders ask for.
    #[must_use]
    pub fn of(orders: &Orders) -> Self {
        // Rewriting stays dearer, so that a guest that gets less of its CPU writes less.
        let [noise, rewritten] =
            [Kind::Steps, Kind::Random].map(|it| if orders.repeated { Kind::Repeated } else { it });
        let plan = |next: &mut u64, seed, name, kind, bytes: u64| {
            let pages = bytes / PAGE_BYTES as u64;
            let first_page = *next;
            *next += pages;
            let pages = usize::try_from(pages).unwrap_or(usize::MAX);
            Plan { name, kind, seed, first_page, pages }
        };
        let (mut next_common, mut next) = (COMMON_FIRST_PAGE, 0);
        let mut common =
            |name, kind, bytes| plan(&mut next_common, orders.common_seed, name, kind, bytes);
        let mut own = |name, kind, bytes| plan(&mut next, orders.seed, name, kind, bytes);
        Self {
            fixed: [
                common("common", noise, orders.common_bytes),
                common("common_text", Kind::Text, orders.common_text_bytes),
                own("random", noise, orders.random_bytes),
                own("text", Kind::Text, orders.text_bytes),
                own("zero", Kind::Zero, orders.zero_bytes),
            ],
            working_set: own(
                "ws",
                if orders.parts { Kind::Parts } else { rewritten },
                orders.working_set_bytes,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_pages_of_a_guest_have_the_same_number() {
        let orders = Orders {
            seed: 7,
            common_bytes: 5 << 12,
            common_text_bytes: 4 << 12,
            random_bytes: 3 << 12,
            text_bytes: 2 << 12,
            zero_bytes: 1 << 12,
            working_set_bytes: 6 << 12,
            ..Orders::default()
        };
        let Plans { fixed, working_set } = Plans::of(&orders);
        let mut plans = Vec::from(fixed);
        plans.push(working_set);
        let numbers = plans.iter().flat_map(|it| it.first_page..it.first_page + it.pages as u64);
        let unique: std::collections::HashSet<u64> = numbers.collect();
        assert_eq!(unique.len(), 21);
        assert_eq!((working_set.kind, working_set.seed), (Kind::Random, 7));
    }

    #[test]
    fn noise_is_cheap_if_told_so() {
        let Plans { fixed, working_set } =
            Plans::of(&Orders { repeated: true, ..Orders::default() });
        let kinds = fixed.map(|plan| plan.kind);
        let expected = [Kind::Repeated, Kind::Text, Kind::Repeated, Kind::Text, Kind::Zero];
        assert_eq!((kinds, working_set.kind), (expected, Kind::Repeated));
    }
}
