//! Where on disks the pages of RAM blocks are, and what was announced of them.

use std::sync::{Arc, OnceLock};

use cachemap::{CacheMap, PAGE_SECTORS, Run};
use content::Name;
use page::{BlockId, PageIndex};
use qemu::guest_memory::GuestMemory;
use wire::DiskLocation;

use super::bits::Bits;

/// The most pages of one map that are looked up outside the guest's memory. A run may begin or
/// end a little outside; a helper that lies could name a whole address space.
const NOWHERE_MAX: u32 = 1 << 16;
/// The memory that a page takes. Its stretch takes the size of [`Stretch`] in addition.
const TOLD_BYTES: usize = size_of::<OnceLock<Option<Name>>>();

/// Consecutive pages of a RAM block that are also consecutive on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) first: u32,
    pub(super) pages: u32,
    pub(super) place: DiskLocation,
    /// The index of its first page in [`Map::told`].
    at: usize,
}

impl Stretch {
    /// The page's place on disk, and its index in [`Map::told`].
    fn find(&self, page: PageIndex) -> Option<(DiskLocation, usize)> {
        let nth = page.0.checked_sub(self.first).filter(|nth| *nth < self.pages)?;
        let sector = self.place.sector + u64::from(nth) * PAGE_SECTORS;
        Some((DiskLocation { sector, ..self.place }, self.at + nth as usize))
    }
}

/// A page that a disk should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageOnDisk {
    pub(crate) place: DiskLocation,
    /// The part that has it.
    part: usize,
    /// Its index in [`Map::told`].
    at: usize,
}

/// Where pages are, and what was announced of them to the destination.
#[derive(Debug, Default)]
pub(super) struct Map {
    /// Stretches by block name, in the order of their pages.
    pub(super) blocks: Vec<(String, Vec<Stretch>)>,
    /// The announced name of each page. None if QEMU has handed the page over before that.
    /// Whichever is set first stays.
    told: Vec<OnceLock<Option<Name>>>,
}

/// The memory that the maps of one migration may take, in addition to its buffers. A helper that
/// names everything, or each page twice, takes no more.
#[derive(Debug)]
pub struct Room {
    left_bytes: usize,
}

impl Room {
    /// Maps may take this fraction (1/4) of the size of all migrations' buffers.
    const PART: usize = 4;

    /// The room for maps next to buffers of this size.
    #[must_use]
    pub fn next_to(buffers_bytes: usize) -> Self {
        Self { left_bytes: buffers_bytes / Self::PART }
    }

    /// As much of a map as there is room for, and whether that is all of it.
    pub(super) fn take(&mut self, mut map: Map) -> (Map, bool) {
        let wanted = map.bytes();
        let is_all = wanted <= self.left_bytes;
        if !is_all {
            map.keep_lowest(u64::MAX, self.left_bytes);
        }
        // Spare capacity was not counted.
        map.blocks.iter_mut().for_each(|(_, stretches)| stretches.shrink_to_fit());
        self.left_bytes = self.left_bytes.saturating_sub(map.bytes());
        map.number();
        (map, is_all)
    }
}

impl Map {
    /// Stretches of one block, in order: the first page, how many, and the place.
    #[cfg(test)]
    pub(super) fn of_rows(
        block: &str,
        rows: impl Iterator<Item = (u32, u32, DiskLocation)>,
    ) -> Self {
        let stretch = |(first, pages, place)| Stretch { first, pages, place, at: 0 };
        Self { blocks: vec![(block.to_owned(), rows.map(stretch).collect())], ..Self::default() }
    }

    pub(super) fn pages(&self) -> u64 {
        let stretches = self.blocks.iter().flat_map(|(_, each)| each);
        stretches.map(|stretch| u64::from(stretch.pages)).sum()
    }

    /// The memory that it takes, including [`Map::told`].
    fn bytes(&self) -> usize {
        let stretches: usize = self.blocks.iter().map(|(_, each)| each.len()).sum();
        let pages = usize::try_from(self.pages()).unwrap_or(usize::MAX);
        let told = pages.saturating_mul(TOLD_BYTES);
        told.saturating_add(stretches.saturating_mul(size_of::<Stretch>()))
    }

    /// Gives each page its index in [`Map::told`].
    fn number(&mut self) {
        let mut pages = 0;
        for stretch in self.blocks.iter_mut().flat_map(|(_, each)| each) {
            stretch.at = pages;
            pages += stretch.pages as usize;
        }
        self.told.reserve_exact(pages);
        self.told.resize_with(pages, OnceLock::new);
    }

    /// Keeps the lowest stretches on disk, disk by disk, with `percent` of the pages. This fixes
    /// how much storage provides, instead of finding it out.
    pub(super) fn cut(&mut self, percent: u64) {
        self.keep_lowest(self.pages() * percent / 100, usize::MAX);
    }

    /// Keeps the lowest stretches on disk, disk by disk: at most `pages`, and no more than fit
    /// `bytes` of memory. A stretch is identified by its position in the list, because a helper
    /// that lies may place many at one sector.
    fn keep_lowest(&mut self, mut pages: u64, mut bytes: usize) {
        for (block, nth) in self.disk_order() {
            let stretch = &mut self.blocks[block].1[nth];
            let room = bytes.saturating_sub(size_of::<Stretch>()) / TOLD_BYTES;
            let fit = u32::try_from(pages.min(room as u64)).unwrap_or(u32::MAX);
            stretch.pages = stretch.pages.min(fit);
            if stretch.pages > 0 {
                pages -= u64::from(stretch.pages);
                bytes -= size_of::<Stretch>() + stretch.pages as usize * TOLD_BYTES;
            }
        }
        for (_, stretches) in &mut self.blocks {
            stretches.retain(|stretch| stretch.pages > 0);
        }
    }

    /// The position of each stretch: its block's index and its own, in the order of the disks.
    fn disk_order(&self) -> Vec<(usize, usize)> {
        let each = self.blocks.iter().enumerate();
        let mut all: Vec<_> = each
            .flat_map(|(block, (_, stretches))| (0..stretches.len()).map(move |nth| (block, nth)))
            .collect();
        all.sort_unstable_by_key(|&(block, nth)| {
            let DiskLocation { disk, sector } = self.blocks[block].1[nth].place;
            (disk, sector, block, nth)
        });
        all
    }
}

/// Consecutive pages as they are on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnDisk {
    pub(crate) block: BlockId,
    pub(crate) first: PageIndex,
    pub(crate) pages: u32,
    pub(crate) disk: u16,
}

pub(super) fn on_disks(announced: &[String], map: &Map) -> Vec<OnDisk> {
    let number = |name: &String| announced.iter().position(|known| known == name);
    let numbers: Vec<Option<u16>> =
        map.blocks.iter().map(|(name, _)| u16::try_from(number(name)?).ok()).collect();
    let each = map.disk_order().into_iter().filter_map(|(block, nth)| {
        let Stretch { first, pages, place, .. } = map.blocks[block].1[nth];
        let (block, first) = (BlockId(numbers[block]?), PageIndex(first));
        Some(OnDisk { block, first, pages, disk: place.disk })
    });
    each.collect()
}

/// All known parts. Their number only grows.
pub(super) type Parts = Arc<[Arc<Map>]>;

/// Finds the places of pages; fast if they are looked up in order.
pub(crate) struct Places<'c> {
    parts: Parts,
    /// The block's index, the same in each part.
    block: usize,
    bits: &'c Bits,
    /// Where the last page was found.
    part: usize,
    at: usize,
}

impl<'c> Places<'c> {
    /// None if nothing is known of that block.
    pub(super) fn of(name: &str, parts: Parts, bits: &'c Bits) -> Option<Self> {
        // All parts have the same blocks.
        let blocks = &parts.first()?.blocks;
        let block = blocks.iter().position(|(known, _)| known == name)?;
        Some(Self { parts, block, bits, part: 0, at: 0 })
    }

    fn stretches(&self, part: usize) -> &[Stretch] {
        let block = self.parts.get(part).and_then(|part| part.blocks.get(self.block));
        block.map_or(&[], |(_, stretches)| stretches)
    }

    pub(crate) fn find(&mut self, page: PageIndex) -> Option<PageOnDisk> {
        // The first part that has the page counts.
        let here = self.stretches(0).get(self.at).filter(|_| self.part == 0);
        if let Some((place, at)) = here.and_then(|stretch| stretch.find(page)) {
            return Some(PageOnDisk { place, part: self.part, at });
        }
        (0..self.parts.len()).find_map(|part| {
            let stretches = self.stretches(part);
            let after = stretches.partition_point(|stretch| stretch.first <= page.0);
            let before = after.checked_sub(1)?;
            let (place, at) = stretches.get(before)?.find(page)?;
            (self.part, self.at) = (part, before);
            Some(PageOnDisk { place, part, at })
        })
    }

    fn slot(&self, found: PageOnDisk) -> Option<&OnceLock<Option<Name>>> {
        self.parts.get(found.part)?.told.get(found.at)
    }

    /// QEMU hands the page over. Returns the name that was announced before; if there is none, it
    /// won't be announced any more.
    pub(crate) fn handed_over(&self, found: PageOnDisk) -> Option<Name> {
        *self.slot(found)?.get_or_init(|| None)
    }

    /// The name announced of a page that was handed over.
    pub(crate) fn told(&self, found: PageOnDisk) -> Option<Name> {
        *self.slot(found)?.get()?
    }

    /// Notes that the page is about to be announced. False if QEMU handed it over first.
    pub(crate) fn tell(&self, page: PageIndex, found: PageOnDisk, name: Name) -> bool {
        !self.bits.is_handed(page)
            && self.slot(found).is_some_and(|told| told.set(Some(name)).is_ok())
    }
}

/// A page that is read again, and its announced name.
pub(crate) struct Reading {
    page: PageIndex,
    pub(crate) name: Name,
    is_first: bool,
}

/// Writes to a page are not tracked until QEMU has handed it over. So its content may have
/// changed when it is read again, and be as announced once more when QEMU hands it over. QEMU's
/// copy has to be sent then.
impl Places<'_> {
    /// The destination gets the page's current content. None if the page was not announced.
    pub(crate) fn begin_to_read(&mut self, page: PageIndex) -> Option<Reading> {
        let found = self.find(page)?;
        let name = self.told(found)?;
        Some(Reading { page, name, is_first: self.bits.read(page) })
    }

    /// The content that was read has the announced name.
    pub(crate) fn is_as_told(&self, reading: &Reading) {
        if reading.is_first {
            self.bits.unread(reading.page);
        }
    }

    /// QEMU hands a page over. Returns the announced name if the destination certainly has or
    /// gets that content last: a page that was handed over before, or read again, may have had
    /// other content since.
    pub(crate) fn has(&mut self, page: PageIndex) -> Option<Name> {
        let name = self.find(page).and_then(|found| self.handed_over(found))?;
        (!self.bits.is_read(page) && !self.bits.is_handed_again(page)).then_some(name)
    }
}

/// Whether the helper's map names pages of a disk that has a number.
pub(super) fn names_pages(map: &CacheMap, numbers: &[Option<u16>]) -> bool {
    map.runs().iter().any(|run| matches!(numbers.get(usize::from(run.device)), Some(Some(_))))
}

/// Converts the helper's map to RAM blocks and disk numbers.
pub(super) fn stretches(
    map: &CacheMap,
    numbers: &[Option<u16>],
    memory: &GuestMemory,
    blocks: Vec<(String, u64)>,
) -> Map {
    let mut found = Map {
        blocks: blocks.into_iter().map(|(name, _)| (name, Vec::new())).collect(),
        ..Map::default()
    };
    let mut nowhere = NOWHERE_MAX;
    for run in map.runs() {
        let Some(disk) = numbers.get(usize::from(run.device)).copied().flatten() else { continue };
        add(run, disk, memory, &mut found.blocks, &mut nowhere);
    }
    for (_, each) in &mut found.blocks {
        each.sort_unstable_by_key(|stretch| stretch.first);
    }
    found
}

/// Adds a run, which may cross the end of a memory region. `nowhere` counts pages outside of the
/// guest's memory down. At 0, the rest of a run is left out from its first such page on.
fn add(
    run: &Run,
    disk: u16,
    memory: &GuestMemory,
    blocks: &mut [(String, Vec<Stretch>)],
    nowhere: &mut u32,
) {
    let mut done = 0_u64;
    while done < u64::from(run.pages) {
        let left = u64::from(run.pages) - done;
        let found = memory.lookup_run(run.page + done, left);
        let Some((place, pages)) = found.filter(|(_, pages)| *pages > 0) else {
            let Some(left) = nowhere.checked_sub(1) else { return };
            *nowhere = left;
            done += 1;
            continue;
        };
        let first = u32::try_from(place.offset / cachemap::PAGE_BYTES);
        if let (Ok(first), Ok(pages), Some((_, each))) =
            (first, u32::try_from(pages), blocks.get_mut(place.block))
        {
            let sector = run.sector + done * PAGE_SECTORS;
            each.push(Stretch { first, pages, place: DiskLocation { disk, sector }, at: 0 });
        }
        done += pages;
    }
}

#[cfg(test)]
pub(super) mod tests;
