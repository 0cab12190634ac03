//! A VM's RAM blocks, for the content index.

use std::sync::Arc;

use content::Holder;
use page::{BlockId, PAGE_BYTES, PageIndex};
use qemu::process::Process;
use ram::Mapping;

/// A VM's RAM as the content index reads it, with pages numbered over all blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    blocks: Vec<Numbered>,
    pages: u64,
}

#[derive(Debug)]
struct Numbered {
    name: String,
    first: u64,
    pages: u64,
    /// None if it can't be read.
    mapping: Option<Arc<Mapping>>,
}

impl Blocks {
    /// Appends a block of `bytes`, with its mapping if it can be read.
    pub fn push(&mut self, name: String, bytes: u64, mapping: Option<Arc<Mapping>>) {
        let pages = bytes / PAGE_BYTES as u64;
        self.blocks.push(Numbered { name, first: self.pages, pages, mapping });
        self.pages += pages;
    }

    /// The number of pages in all blocks.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether any page can be read.
    pub(super) fn can_be_read(&self) -> bool {
        self.blocks.iter().any(|block| block.mapping.is_some())
    }

    /// Whether the block's pages can be read, and so written.
    pub(super) fn reaches(&self, block: BlockId) -> bool {
        self.blocks.get(usize::from(block.0)).is_some_and(|block| block.mapping.is_some())
    }

    /// A page's number. None if it can't be read.
    pub(super) fn number(&self, block: BlockId, page: PageIndex) -> Option<u64> {
        let block = self.blocks.get(usize::from(block.0))?;
        block.mapping.as_ref()?;
        let page = u64::from(page.0);
        (page < block.pages).then(|| block.first + page)
    }

    /// The number of a block's first page. None if no block that can be read has this name and
    /// size.
    pub(crate) fn first_page(&self, name: &str, bytes: u64) -> Option<u64> {
        let block = self.blocks.iter().find(|block| block.name == name)?;
        let is_it = block.mapping.is_some() && block.pages == bytes / PAGE_BYTES as u64;
        is_it.then_some(block.first)
    }

    /// The QEMU process that has this memory. None if no block can be read, or the process has
    /// ended.
    pub(super) fn process(&self) -> Option<Process> {
        let mapping = self.blocks.iter().find_map(|block| block.mapping.as_ref())?;
        let process = Process::now(mapping.pid()).ok()?;
        mapping.still_there().ok().map(|()| process)
    }

    /// Marks which pages of one block, from page number `first` on, are in memory.
    fn present_in(block: &Numbered, first: u64, present: &mut [bool]) {
        let offset = (first - block.first) * PAGE_BYTES as u64;
        let known = block.mapping.as_ref().map(|mapping| mapping.present(offset, present));
        if !matches!(known, Some(Ok(()))) {
            present.fill(false);
        }
    }

    /// The mapping of a page's block, and the page's offset in it. None if it can't be read.
    fn find(&self, page: u64) -> Option<(&Arc<Mapping>, u64)> {
        let after = self.blocks.partition_point(|block| block.first <= page);
        let block = self.blocks.get(after.checked_sub(1)?)?;
        let nth = page - block.first;
        let mapping = block.mapping.as_ref().filter(|_| nth < block.pages)?;
        Some((mapping, nth * PAGE_BYTES as u64))
    }
}

impl Holder for Blocks {
    fn read(&self, page: u64, into: &mut [u8]) -> bool {
        self.find(page).is_some_and(|(mapping, offset)| mapping.read(offset, into).is_ok())
    }

    fn read_many(&self, pages: &[u64], into: &mut [u8]) -> usize {
        let places: Vec<_> = pages.iter().map_while(|page| self.find(*page)).collect();
        let mut done = 0;
        // Adjacent requests for one block are one read.
        for run in places.chunk_by(|(one, _), (next, _)| Arc::ptr_eq(one, next)) {
            let bytes = done * PAGE_BYTES..(done + run.len()) * PAGE_BYTES;
            let offsets = run.iter().map(|(_, offset)| *offset);
            let read = run.first().zip(into.get_mut(bytes));
            if read.is_none_or(|((mapping, _), into)| mapping.gather(offsets, into).is_err()) {
                break;
            }
            done += run.len();
        }
        done
    }

    /// Pages that are not in memory are not worth loading.
    fn present(&self, first: u64, mut present: &mut [bool]) {
        let mut page = first;
        let after = self.blocks.partition_point(|block| block.first + block.pages <= page);
        for block in self.blocks.get(after..).unwrap_or_default() {
            if present.is_empty() {
                return;
            }
            let left = usize::try_from(block.first + block.pages - page).unwrap_or(usize::MAX);
            let (here, rest) = present.split_at_mut(left.min(present.len()));
            Self::present_in(block, page, here);
            page += here.len() as u64;
            present = rest;
        }
        present.fill(false);
    }
}

#[cfg(test)]
mod tests {
    use content::Key;

    use super::*;

    #[test]
    fn pages_are_numbered_over_all_blocks_and_read_if_mapped() {
        let mut blocks = Blocks::default();
        let [first, last] = [3, 2].map(|pages| Arc::new(Mapping::own(pages * PAGE_BYTES as u64)));
        blocks.push("first".to_owned(), 3 * PAGE_BYTES as u64, Some(Arc::clone(&first)));
        blocks.push("rom".to_owned(), 4 * PAGE_BYTES as u64, None);
        blocks.push("last".to_owned(), 2 * PAGE_BYTES as u64, Some(Arc::clone(&last)));
        for (page, byte) in [10, 11, 12].into_iter().enumerate() {
            first.fill((page * PAGE_BYTES) as u64, PAGE_BYTES as u64, byte).unwrap();
        }
        last.fill(PAGE_BYTES as u64, PAGE_BYTES as u64, 18).unwrap();
        assert_eq!(blocks.pages(), 9);
        assert_eq!(blocks.number(BlockId(2), PageIndex(1)), Some(8));
        assert_eq!(blocks.number(BlockId(2), PageIndex(2)), None);
        assert_eq!(blocks.number(BlockId(1), PageIndex(0)), None, "it can't be read");
        assert_eq!(blocks.number(BlockId(3), PageIndex(0)), None);
        let first_page =
            |name: &str, pages: u64| blocks.first_page(name, pages * PAGE_BYTES as u64);
        assert_eq!((first_page("first", 3), first_page("last", 2)), (Some(0), Some(7)));
        assert_eq!((first_page("rom", 4), first_page("last", 3)), (None, None));
        assert_eq!(first_page("other", 3), None);
        let reached = [0, 1, 2, 3].map(|block| blocks.reaches(BlockId(block)));
        assert_eq!(reached, [true, false, true, false]);
        let mut page = vec![0; PAGE_BYTES];
        assert!(blocks.read(8, &mut page) && page.iter().all(|byte| *byte == 18));
        assert!(!blocks.read(4, &mut page) && !blocks.read(9, &mut page));
        let mut pages = vec![0; 5 * PAGE_BYTES];
        assert_eq!(blocks.read_many(&[2, 0, 8, 1, 5], &mut pages), 4);
        let firsts: Vec<u8> = pages.chunks(PAGE_BYTES).map(|page| page[0]).collect();
        assert_eq!(firsts[..4], [12, 10, 18, 11]);
        let process = |blocks: &Blocks| blocks.process().map(|process| process.pid());
        assert_eq!(process(&blocks), Some(std::process::id()));
        assert_eq!(process(&Blocks::default()), None);
    }

    #[test]
    fn only_resident_pages_are_scanned() {
        let mut blocks = Blocks::default();
        let [first, last] = [300, 200].map(|pages| Arc::new(Mapping::own(pages * 4096)));
        blocks.push("first".to_owned(), 300 * 4096, Some(Arc::clone(&first)));
        blocks.push("rom".to_owned(), 100 * 4096, None);
        blocks.push("last".to_owned(), 200 * 4096, Some(Arc::clone(&last)));
        for (mapping, page) in [(&first, 7), (&first, 299), (&last, 0), (&last, 199)] {
            mapping.fill(page * 4096, 4096, 9).unwrap();
        }
        let there = |first, pages| {
            let mut present = vec![true; pages];
            blocks.present(first, &mut present);
            (first..).zip(present).filter_map(|(page, there)| there.then_some(page)).collect()
        };
        let all: Vec<u64> = there(0, 700);
        assert_eq!(all, [7, 299, 400, 599]);
        let some: Vec<u64> = there(299, 102);
        assert_eq!(some, [299, 400]);
        // A scanner names these pages, and makes no other page resident.
        let index = content::Index::new(1 << 20);
        let key = Key::new(b"", &content::Domain::default());
        let holder = Arc::new(blocks);
        let member = index.join(Arc::clone(&holder) as _, key, holder.pages()).unwrap();
        let scanner = content::Scanner::start(&index, 1.0, |_| {}).unwrap();
        while member.scanned().rounds == 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(scanner);
        assert_eq!(member.scanned().named, 4);
        let mut present = [true; 600];
        holder.present(0, &mut present);
        assert_eq!(present.iter().filter(|there| **there).count(), 4);
    }
}
