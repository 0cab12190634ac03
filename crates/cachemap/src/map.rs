//! Which pages are also on a disk.

use crate::{Device, PAGE_SECTORS, Run, Summary};

/// A helper's report: pages within the VM's memory, and places within its disks. It may be false,
/// and it ages while the guest runs. It is a hint, and each page is compared before it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheMap {
    devices: Vec<Device>,
    runs: Vec<Run>,
    summary: Summary,
}

impl CacheMap {
    /// Sorts the runs. If a page was reported twice, one of its places is kept.
    pub(crate) fn new(devices: Vec<Device>, mut runs: Vec<Run>, summary: Summary) -> Self {
        runs.sort_unstable_by_key(|run| (run.page, run.device, run.sector, run.pages));
        let mut end = 0_u64;
        runs.retain_mut(|run| {
            let twice = end.saturating_sub(run.page).min(run.pages.into());
            run.page += twice;
            run.sector += twice * PAGE_SECTORS;
            run.pages -= u32::try_from(twice).unwrap_or(run.pages);
            end = end.max(run.end_page());
            run.pages > 0
        });
        runs.dedup_by(|next, run| {
            let longer = run.pages.checked_add(next.pages).filter(|_| run.is_followed_by(next));
            run.pages = longer.unwrap_or(run.pages);
            longer.is_some()
        });
        runs.shrink_to_fit();
        Self { devices, runs, summary }
    }

    /// The disks that places are on.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The runs, in the order of their pages. No page is in two of them.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The number of their pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.pages)).sum()
    }

    /// The helper's summary.
    #[must_use]
    pub fn summary(&self) -> &Summary {
        &self.summary
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_are_in_order_and_joined() {
        let run = |page, sector, pages, device| Run { page, sector, pages, device };
        let runs = vec![run(20, 800, 2, 1), run(10, 80, 5, 0), run(15, 120, 1, 0)];
        let map = CacheMap::new(Vec::new(), runs, Summary::default());
        assert_eq!(map.runs(), [run(10, 80, 6, 0), run(20, 800, 2, 1)]);
        assert_eq!(map.pages(), 8);
    }

    proptest! {
        #[test]
        fn each_page_has_one_of_its_reported_places(
            fields in prop::collection::vec((0..60_u64, 0..500_u64, 1..20_u32, 0..3_u16), 0..30),
        ) {
            let runs: Vec<Run> = fields
                .into_iter()
                .map(|(page, sector, pages, device)| Run { page, sector, pages, device })
                .collect();
            let map = CacheMap::new(Vec::new(), runs.clone(), Summary::default());
            let places = |run: &Run| -> Vec<(u64, u16, u64)> {
                let Run { page, sector, pages, device } = *run;
                let each = 0..u64::from(pages);
                each.map(|nth| (page + nth, device, sector + nth * PAGE_SECTORS)).collect()
            };
            let told: BTreeSet<_> = runs.iter().flat_map(places).collect();
            let kept: Vec<_> = map.runs().iter().flat_map(places).collect();
            prop_assert!(kept.iter().all(|place| told.contains(place)));
            prop_assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
            let pages: BTreeSet<u64> = told.iter().map(|(page, ..)| *page).collect();
            prop_assert_eq!(kept.len(), pages.len());
            prop_assert_eq!(map.pages(), pages.len() as u64);
        }
    }
}
