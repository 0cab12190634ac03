//! Where on disks the pages of RAM blocks are, and what was told of them.

use std::sync::{Arc, OnceLock};

use cachemap::{CacheMap, PAGE_SECTORS, Run};
use content::Name;
use page::{BlockId, PageIndex};
use qemu::guest_memory::GuestMemory;
use wire::DiskPlace;

use super::bits::Bits;

/// What a page costs; its stretch costs [`Stretch`]'s size beside.
const TOLD_BYTES: usize = size_of::<OnceLock<Option<Name>>>();

/// Pages of a RAM block that follow each other, and are on a disk in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) first: u32,
    pub(super) pages: u32,
    pub(super) place: DiskPlace,
    /// Where its pages stand in what was told of them.
    at: usize,
}

impl Stretch {
    /// The page's place, and where it stands in what was told.
    fn find(&self, page: PageIndex) -> Option<(DiskPlace, usize)> {
        let nth = page.0.checked_sub(self.first).filter(|nth| *nth < self.pages)?;
        let sector = self.place.sector + u64::from(nth) * PAGE_SECTORS;
        Some((DiskPlace { sector, ..self.place }, self.at + nth as usize))
    }
}

/// A page that a disk should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) place: DiskPlace,
    /// In which part.
    part: usize,
    /// Where it stands in what was told.
    at: usize,
}

/// Where pages are, and what the destination was told of them.
#[derive(Debug, Default)]
pub(super) struct Map {
    /// By their block's name; stretches are in their pages' order.
    pub(super) blocks: Vec<(String, Vec<Stretch>)>,
    /// The name that the destination was told ahead; none for a page that QEMU has
    /// handed over before that. Whichever comes first stays.
    told: Vec<OnceLock<Option<Name>>>,
}

/// What the maps of one migration may take of memory, beside its buffers. A helper
/// that names everything, or each page twice, costs no more than that.
#[derive(Debug)]
pub struct Room {
    left_bytes: usize,
}

impl Room {
    /// A part of what all migrations have of buffers.
    const PART: usize = 4;

    /// A part of so many bytes of buffers.
    #[must_use]
    pub fn beside(buffers_bytes: usize) -> Self {
        Self { left_bytes: buffers_bytes / Self::PART }
    }

    /// As much of a map as there is room for. Says whether that is all of it.
    pub(super) fn take(&mut self, mut map: Map) -> (Map, bool) {
        let wanted = map.bytes();
        let is_all = wanted <= self.left_bytes;
        if !is_all {
            map.keep_lowest(u64::MAX, self.left_bytes);
        }
        // What a vector has in reserve was not counted.
        map.blocks.iter_mut().for_each(|(_, stretches)| stretches.shrink_to_fit());
        self.left_bytes = self.left_bytes.saturating_sub(map.bytes());
        map.number();
        (map, is_all)
    }
}

impl Map {
    /// Rows of pages of one block, in their order: the first, how many, and where.
    #[cfg(test)]
    pub(super) fn of_rows(block: &str, rows: impl Iterator<Item = (u32, u32, DiskPlace)>) -> Self {
        let stretch = |(first, pages, place)| Stretch { first, pages, place, at: 0 };
        Self { blocks: vec![(block.to_owned(), rows.map(stretch).collect())], ..Self::default() }
    }

    fn pages(&self) -> u64 {
        let stretches = self.blocks.iter().flat_map(|(_, each)| each);
        stretches.map(|stretch| u64::from(stretch.pages)).sum()
    }

    /// What it takes of memory with a place for what is told of each page.
    fn bytes(&self) -> usize {
        let stretches: usize = self.blocks.iter().map(|(_, each)| each.len()).sum();
        let pages = usize::try_from(self.pages()).unwrap_or(usize::MAX);
        let told = pages.saturating_mul(TOLD_BYTES);
        told.saturating_add(stretches.saturating_mul(size_of::<Stretch>()))
    }

    /// Gives each page its place in what is told.
    fn number(&mut self) {
        let mut pages = 0;
        for stretch in self.blocks.iter_mut().flat_map(|(_, each)| each) {
            stretch.at = pages;
            pages += stretch.pages as usize;
        }
        self.told.reserve_exact(pages);
        self.told.resize_with(pages, OnceLock::new);
    }

    /// Of all stretches the lowest, disk by disk, with `percent` of the pages: by how
    /// much storage brings, if that is not to be found out.
    pub(super) fn cut(&mut self, percent: u64) {
        self.keep_lowest(self.pages() * percent / 100, usize::MAX);
    }

    /// Of all stretches the lowest, disk by disk: so many pages at most, and no more
    /// than has room in so many bytes. A stretch is known by where it stands: a helper
    /// that lies has many at one place of a disk.
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

    /// Where each stretch stands: its block's place in the list, and its own there.
    fn disk_order(&self) -> Vec<(usize, usize)> {
        let each = self.blocks.iter().enumerate();
        let mut all: Vec<_> = each
            .flat_map(|(block, (_, stretches))| (0..stretches.len()).map(move |nth| (block, nth)))
            .collect();
        all.sort_unstable_by_key(|&(block, nth)| {
            let DiskPlace { disk, sector } = self.blocks[block].1[nth].place;
            (disk, sector, block, nth)
        });
        all
    }

    /// Each stretch with its block's place in the list.
    fn in_disk_order(&self) -> impl Iterator<Item = (usize, Stretch)> {
        let all = self.disk_order().into_iter();
        all.map(|(block, nth)| (block, self.blocks[block].1[nth]))
    }
}

/// A row of pages as a disk has it.
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
    let each = map.in_disk_order().filter_map(|(block, stretch)| {
        let Stretch { first, pages, place, .. } = stretch;
        let (block, first) = (BlockId(numbers[block]?), PageIndex(first));
        Some(OnDisk { block, first, pages, disk: place.disk })
    });
    each.collect()
}

/// All parts that are known. They only become more.
pub(super) type Parts = Arc<[Arc<Map>]>;

/// Finds pages' places, fast where they come in order.
pub(crate) struct Places<'c> {
    parts: Parts,
    /// In each part.
    block: usize,
    bits: &'c Bits,
    /// Where the last was found.
    part: usize,
    at: usize,
}

impl<'c> Places<'c> {
    /// None if nothing is known of that block.
    pub(super) fn of(name: &str, parts: Parts, bits: &'c Bits) -> Option<Self> {
        // They all have the same.
        let blocks = &parts.first()?.blocks;
        let block = blocks.iter().position(|(known, _)| known == name)?;
        Some(Self { parts, block, bits, part: 0, at: 0 })
    }

    fn stretches(&self, part: usize) -> &[Stretch] {
        let block = self.parts.get(part).and_then(|part| part.blocks.get(self.block));
        block.map_or(&[], |(_, stretches)| stretches)
    }

    pub(crate) fn find(&mut self, page: PageIndex) -> Option<Found> {
        // The first part that has it is the one that counts.
        let here = self.stretches(0).get(self.at).filter(|_| self.part == 0);
        if let Some((place, at)) = here.and_then(|stretch| stretch.find(page)) {
            return Some(Found { place, part: self.part, at });
        }
        (0..self.parts.len()).find_map(|part| {
            let stretches = self.stretches(part);
            let after = stretches.partition_point(|stretch| stretch.first <= page.0);
            let before = after.checked_sub(1)?;
            let (place, at) = stretches.get(before)?.find(page)?;
            (self.part, self.at) = (part, before);
            Some(Found { place, part, at })
        })
    }

    fn slot(&self, found: Found) -> Option<&OnceLock<Option<Name>>> {
        self.parts.get(found.part)?.told.get(found.at)
    }

    /// QEMU hands it over. What the destination was told of it before, if anything;
    /// else it won't be told ahead any more.
    pub(crate) fn handed_over(&self, found: Found) -> Option<Name> {
        *self.slot(found)?.get_or_init(|| None)
    }

    /// What was told of a page that was handed over.
    pub(crate) fn told(&self, found: Found) -> Option<Name> {
        *self.slot(found)?.get()?
    }

    /// The destination is about to be told of that page. False if QEMU was first.
    pub(crate) fn tell(&self, page: PageIndex, found: Found, name: Name) -> bool {
        !self.bits.is_handed(page)
            && self.slot(found).is_some_and(|told| told.set(Some(name)).is_ok())
    }
}

/// A page that is read anew, and what was told of it.
pub(crate) struct Reading {
    page: PageIndex,
    pub(crate) name: Name,
    is_first: bool,
}

/// Before QEMU has handed a page over nobody hears of writes to it. So what is read
/// of it then may be gone when QEMU comes, and the page be as it was told once more:
/// QEMU's copy has to be sent.
impl Places<'_> {
    /// The destination gets what this page contains now. None if it was not told ahead.
    pub(crate) fn begin_to_read(&mut self, page: PageIndex) -> Option<Reading> {
        let found = self.find(page)?;
        let name = self.told(found)?;
        Some(Reading { page, name, is_first: self.bits.read(page) })
    }

    /// What was read has the name that was told.
    pub(crate) fn is_as_told(&self, reading: &Reading) {
        if reading.is_first {
            self.bits.unread(reading.page);
        }
    }

    /// QEMU hands a page over. What the destination has or gets by what was told of it,
    /// if that is sure: of a page that came before it has had something else since.
    pub(crate) fn has(&mut self, page: PageIndex) -> Option<Name> {
        let name = self.find(page).and_then(|found| self.handed_over(found))?;
        (!self.bits.is_read(page) && !self.bits.is_handed_again(page)).then_some(name)
    }
}

/// The map in terms of blocks, and of disks by their numbers.
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
    for run in map.runs() {
        let Some(disk) = numbers.get(usize::from(run.device)).copied().flatten() else { continue };
        add(run, disk, memory, &mut found.blocks);
    }
    for (_, each) in &mut found.blocks {
        each.sort_unstable_by_key(|stretch| stretch.first);
    }
    found
}

/// A run may go over the end of a piece of memory.
fn add(run: &Run, disk: u16, memory: &GuestMemory, blocks: &mut [(String, Vec<Stretch>)]) {
    let mut done = 0_u64;
    while done < u64::from(run.pages) {
        let left = u64::from(run.pages) - done;
        let found = memory.lookup_run(run.page + done, left);
        let Some((place, pages)) = found.filter(|(_, pages)| *pages > 0) else {
            done += 1;
            continue;
        };
        let first = u32::try_from(place.offset / cachemap::PAGE_BYTES);
        if let (Ok(first), Ok(pages), Some((_, each))) =
            (first, u32::try_from(pages), blocks.get_mut(place.block))
        {
            let sector = run.sector + done * PAGE_SECTORS;
            each.push(Stretch { first, pages, place: DiskPlace { disk, sector }, at: 0 });
        }
        done += pages;
    }
}

#[cfg(test)]
pub(super) mod tests;
