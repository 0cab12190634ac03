//! Names of a VM's pages from before its migration.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use content::{EarlierNames, Key, Name, NamesReader};
use page::{BlockId, PageIndex};
use wire::Announced;

use crate::destination::{Blocks, Sharing};

/// The names that the scanner made of this VM's pages.
#[derive(Debug)]
pub struct NamedBefore {
    names: Arc<EarlierNames>,
    /// The scanner's numbers of pages.
    blocks: Arc<Blocks>,
    /// By QEMU's number of a block, the scanner's of its first page; none if it scans no such
    /// block.
    firsts: OnceLock<Vec<Option<u64>>>,
    used: AtomicU64,
}

impl NamedBefore {
    /// The names of the VM with this process, made with the key of the domain in which it moves.
    /// None if it is not watched in that domain.
    #[must_use]
    pub fn of_vm(sharing: &Sharing, pid: u32, key: &Key) -> Option<Self> {
        let (names, blocks) = sharing.earlier_names(pid, key)?;
        Some(Self::new(names, blocks))
    }

    fn new(names: Arc<EarlierNames>, blocks: Arc<Blocks>) -> Self {
        Self { names, blocks, firsts: OnceLock::new(), used: AtomicU64::new(0) }
    }

    /// QEMU's block list is known.
    pub(super) fn announce(&self, blocks: &[Announced]) {
        let first = |block: &Announced| self.blocks.first_page(&block.name, block.bytes);
        let _ = self.firsts.set(blocks.iter().map(first).collect());
    }

    /// How many bodies had their names already.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    fn of(&self, block: BlockId) -> Option<OfBlock<'_>> {
        let first = *self.firsts.get()?.get(usize::from(block.0))?;
        Some(OfBlock { all: self, first: first?, names: self.names.read(), used: 0 })
    }
}

/// Names pages of one block.
pub(super) struct Namer<'n> {
    key: &'n Key,
    before: Option<OfBlock<'n>>,
}

/// The names of one block's pages.
struct OfBlock<'n> {
    all: &'n NamedBefore,
    first: u64,
    names: NamesReader<'n>,
    used: u64,
}

impl<'n> Namer<'n> {
    pub(super) fn new(key: &'n Key, before: Option<&'n NamedBefore>, block: BlockId) -> Self {
        Self { key, before: before.and_then(|before| before.of(block)) }
    }

    /// The name of a page that holds, or is sent with, these bytes.
    pub(super) fn name(&mut self, page: PageIndex, bytes: &[u8]) -> Name {
        let known = self.before.as_mut().and_then(|before| before.name(page, bytes));
        known.unwrap_or_else(|| self.key.name(bytes))
    }

    /// The pages were bodies to be sent: counts those that had their names already.
    pub(super) fn count(self) {
        if let Some(OfBlock { all, used, .. }) = self.before {
            all.used.fetch_add(used, Relaxed);
        }
    }
}

impl OfBlock<'_> {
    fn name(&mut self, page: PageIndex, bytes: &[u8]) -> Option<Name> {
        let name = self.names.name(self.first + u64::from(page.0), bytes)?;
        self.used += 1;
        Some(name)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use content::{Domain, Index, Scanner};
    use page::PAGE_BYTES;
    use ram::Mapping;

    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    /// Of a VM that was scanned. Page 5 of its 8 pages of `ram` is filled with 7, page 6 with 8; its
    /// `rom` can't be read.
    pub(crate) fn scanned(key: &Key) -> NamedBefore {
        let ram = Arc::new(Mapping::own(8 * PAGE));
        for (page, byte) in [(5, 7), (6, 8)] {
            ram.fill(page * PAGE, PAGE, byte).unwrap();
        }
        let mut blocks = Blocks::default();
        blocks.push("rom".to_owned(), 3 * PAGE, None);
        blocks.push("ram".to_owned(), 8 * PAGE, Some(ram));
        let blocks = Arc::new(blocks);
        let index = Index::new(1 << 20);
        index.set_common(key.clone());
        let member = index.join(Arc::clone(&blocks) as _, key.clone(), blocks.pages()).unwrap();
        let scanner = Scanner::start(&index, 1.0, |_| {}).unwrap();
        while member.scanned().rounds == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(scanner);
        NamedBefore::new(member.earlier_names(), blocks)
    }

    #[test]
    fn a_page_that_was_scanned_has_its_name_unless_it_has_changed() {
        let key = Key::new(b"secret", &Domain::default());
        let before = scanned(&key);
        let name = |(block, page, byte): (u16, u32, u8)| {
            let mut namer = Namer::new(&key, Some(&before), BlockId(block));
            let name = namer.name(PageIndex(page), &[byte; PAGE_BYTES]);
            assert_eq!(name, key.name(&[byte; PAGE_BYTES]), "page {page} of block {block}");
            namer.count();
        };
        name((1, 5, 7));
        assert_eq!(before.used(), 0, "QEMU's numbers of blocks are not known yet");
        let announced =
            |name: &str, pages: u64| Announced { name: name.to_owned(), bytes: pages * PAGE };
        before.announce(&[announced("vga", 8), announced("ram", 8), announced("rom", 3)]);
        for (page, used) in [
            ((1, 5, 7), 1),
            ((1, 6, 8), 2),
            // Written since, never scanned, and of other blocks.
            ((1, 6, 9), 2),
            ((1, 4, 7), 2),
            ((0, 5, 7), 2),
            ((2, 2, 7), 2),
            ((3, 5, 7), 2),
        ] {
            name(page);
            assert_eq!(before.used(), used, "{page:?}");
        }
    }
}
