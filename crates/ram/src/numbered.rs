//! RAM blocks by their numbers in QEMU's stream.

use std::sync::{Arc, OnceLock};

use page::{BlockId, PageIndex};

use crate::Mapping;

/// The readable blocks, once the block list is known.
#[derive(Debug, Default)]
pub struct Numbered {
    blocks: OnceLock<Vec<Option<Arc<Mapping>>>>,
}

impl Numbered {
    /// Sets the block list, in the order of the numbers; none for a block that can't be
    /// read. Only the first call counts.
    pub fn announce(&self, blocks: impl Iterator<Item = Option<Arc<Mapping>>>) {
        let _ = self.blocks.set(blocks.collect());
    }

    fn block(&self, block: BlockId) -> Option<&Mapping> {
        self.blocks.get()?.get(usize::from(block.0))?.as_deref()
    }

    /// Whether the block can be read.
    #[must_use]
    pub fn reaches(&self, block: BlockId) -> bool {
        self.block(block).is_some()
    }

    /// Reads the current content of pages, one after the other; false if that fails.
    pub fn read(
        &self,
        block: BlockId,
        pages: impl ExactSizeIterator<Item = PageIndex>,
        into: &mut [u8],
    ) -> bool {
        let offsets = pages.map(PageIndex::offset);
        self.block(block).is_some_and(|ram| ram.gather(offsets, into).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use page::PAGE_BYTES;

    use super::*;

    #[test]
    fn pages_of_announced_and_reachable_blocks_are_read() {
        let ram = Numbered::default();
        let mut bytes = [0; 2 * PAGE_BYTES];
        let mut read = |ram: &Numbered, block, pages: [u32; 2]| {
            let done = ram.read(BlockId(block), pages.into_iter().map(PageIndex), &mut bytes);
            done.then(|| (bytes[0], bytes[PAGE_BYTES]))
        };
        assert_eq!(read(&ram, 1, [0, 1]), None, "not announced");
        let mapping = Arc::new(Mapping::own(3 * PAGE_BYTES as u64));
        for page in 0..3_u8 {
            let offset = u64::from(page) * PAGE_BYTES as u64;
            mapping.fill(offset, PAGE_BYTES as u64, 10 + page).unwrap();
        }
        ram.announce([None, Some(mapping)].into_iter());
        ram.announce(std::iter::empty());
        assert!(ram.reaches(BlockId(1)) && !ram.reaches(BlockId(0)) && !ram.reaches(BlockId(2)));
        assert_eq!(read(&ram, 1, [2, 0]), Some((12, 10)));
        assert_eq!(read(&ram, 1, [2, 3]), None);
        assert_eq!(read(&ram, 0, [0, 0]), None);
    }
}
