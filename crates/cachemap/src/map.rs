//! Which pages are also on a disk.

use crate::{Device, PAGE_SECTORS, Run, Summary};

/// Where on a disk a page's content should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskSector {
    /// The disk, by its index in [`CacheMap::devices`].
    pub device: u16,
    /// Its first sector, of 512 bytes.
    pub sector: u64,
}

/// A helper's report: pages within the VM's memory, and places within its disks. It may be false,
/// and it ages while the guest runs. It is a hint, and each page is compared before it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheMap {
    devices: Vec<Device>,
    runs: Vec<Run>,
    pages: u64,
    overlapping: u64,
    summary: Summary,
}

impl CacheMap {
    /// Sorts the runs. If a page was reported twice, one of its places is kept.
    pub(crate) fn new(devices: Vec<Device>, mut runs: Vec<Run>, summary: Summary) -> Self {
        runs.sort_unstable_by_key(|run| (run.page, run.device, run.sector, run.pages));
        let told: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
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
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        Self { devices, runs, pages, overlapping: told - pages, summary }
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
        self.pages
    }

    /// How many reported pages had been reported before.
    #[must_use]
    pub fn overlapping(&self) -> u64 {
        self.overlapping
    }

    /// The helper's summary.
    #[must_use]
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Where a page should be on disk.
    #[must_use]
    pub fn find(&self, page: u64) -> Option<DiskSector> {
        let after = self.runs.partition_point(|run| run.page <= page);
        let run = self.runs.get(after.checked_sub(1)?).filter(|run| page < run.end_page())?;
        let sector = run.sector + (page - run.page) * PAGE_SECTORS;
        Some(DiskSector { device: run.device, sector })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_are_found_where_a_run_has_them() {
        let run = |page, sector, pages, device| Run { page, sector, pages, device };
        let runs = vec![run(20, 800, 2, 1), run(10, 80, 5, 0), run(15, 120, 1, 0)];
        let map = CacheMap::new(Vec::new(), runs, Summary::default());
        assert_eq!(map.runs(), [run(10, 80, 6, 0), run(20, 800, 2, 1)]);
        assert_eq!((map.pages(), map.overlapping()), (8, 0));
        let place = |device, sector| Some(DiskSector { device, sector });
        assert_eq!(map.find(10), place(0, 80));
        assert_eq!(map.find(15), place(0, 120));
        assert_eq!(map.find(21), place(1, 808));
        for page in [0, 9, 16, 19, 22, u64::MAX] {
            assert_eq!(map.find(page), None, "{page}");
        }
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
            let told: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
            let map = CacheMap::new(Vec::new(), runs.clone(), Summary::default());
            for page in 0..100 {
                let places: Vec<DiskSector> = runs
                    .iter()
                    .filter(|run| (run.page..run.end_page()).contains(&page))
                    .map(|run| DiskSector {
                        device: run.device,
                        sector: run.sector + (page - run.page) * PAGE_SECTORS,
                    })
                    .collect();
                match map.find(page) {
                    Some(place) => prop_assert!(places.contains(&place)),
                    None => prop_assert!(places.is_empty()),
                }
            }
            let in_order = |pair: &[Run]| pair[0].end_page() <= pair[1].page;
            prop_assert!(map.runs().windows(2).all(in_order));
            prop_assert_eq!(map.pages() + map.overlapping(), told);
        }
    }
}
