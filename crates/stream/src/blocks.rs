//! The RAM blocks that QEMU announced, with lookup by name.

use std::collections::HashMap;

use page::{BlockId, PAGE_BYTES, PageIndex};

use crate::StreamError;

/// Most blocks of one VM: as many as a [`BlockId`] can number. Real VMs have
/// some dozens.
pub const BLOCKS_MAX: usize = 65_535;

/// Most bytes of one block: as many pages as a [`PageIndex`] can number.
pub const BLOCK_BYTES_MAX: u64 = (PAGE_BYTES as u64) << 32;

/// A RAM block from QEMU's block list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// QEMU's name of the block, such as `pc.ram`.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
}

/// The checked block list. A [`BlockId`] is an index into it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    list: Vec<Block>,
    by_name: HashMap<Box<[u8]>, BlockId>,
}

impl Blocks {
    /// Checks a whole list.
    ///
    /// # Errors
    /// The [`StreamError`]s of block lists.
    pub fn new(list: impl IntoIterator<Item = Block>) -> Result<Self, StreamError> {
        let mut blocks = Self::default();
        for block in list {
            blocks.push(block.name.as_bytes(), block.bytes)?;
        }
        Ok(blocks)
    }

    /// The blocks in the order in which QEMU announced them.
    #[must_use]
    pub fn list(&self) -> &[Block] {
        &self.list
    }

    /// The block of that name.
    #[must_use]
    pub fn find(&self, name: &[u8]) -> Option<BlockId> {
        self.by_name.get(name).copied()
    }

    /// The block with that number.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<&Block> {
        self.list.get(usize::from(id.0))
    }

    /// The page at `offset` of a block.
    pub(crate) fn page(&self, id: BlockId, offset: u64) -> Result<PageIndex, StreamError> {
        let block = self.block(id).ok_or(StreamError::ContinueWithoutBlock)?;
        match PageIndex::from_offset(offset) {
            Some(page) if offset < block.bytes => Ok(page),
            _ => Err(StreamError::OutsideBlock {
                name: block.name.clone(),
                offset,
                block_bytes: block.bytes,
            }),
        }
    }

    pub(crate) fn push(&mut self, name: &[u8], bytes: u64) -> Result<(), StreamError> {
        let Some(id) = u16::try_from(self.list.len()).ok().filter(|id| *id < u16::MAX) else {
            return Err(StreamError::TooManyBlocks);
        };
        let name = match std::str::from_utf8(name) {
            Ok(text) if sound(text) => text,
            _ => {
                return Err(StreamError::BlockName {
                    name: String::from_utf8_lossy(name).into_owned(),
                });
            }
        };
        if !bytes.is_multiple_of(PAGE_BYTES as u64) || bytes > BLOCK_BYTES_MAX {
            return Err(StreamError::BlockLength { name: name.to_owned(), bytes });
        }
        if self.by_name.insert(name.as_bytes().into(), BlockId(id)).is_some() {
            return Err(StreamError::BlockTwice { name: name.to_owned() });
        }
        self.list.push(Block { name: name.to_owned(), bytes });
        Ok(())
    }
}

/// Whether a name is acceptable: it goes into messages and back into a stream.
fn sound(name: &str) -> bool {
    !name.is_empty() && name.len() <= 255 && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, bytes: u64) -> Block {
        Block { name: name.to_owned(), bytes }
    }

    #[test]
    fn finds_blocks_by_name_and_pages_by_offset() {
        let blocks = Blocks::new([block("pc.ram", 8192), block("pc.bios", 4096)]).unwrap();
        assert_eq!(blocks.find(b"pc.bios"), Some(BlockId(1)));
        assert_eq!(blocks.find(b"pc.rom"), None);
        assert_eq!(blocks.page(BlockId(0), 4096), Ok(PageIndex(1)));
        assert!(blocks.page(BlockId(0), 8192).is_err());
        assert!(blocks.page(BlockId(0), 1).is_err());
        assert!(blocks.page(BlockId(2), 0).is_err());
    }

    #[test]
    fn refuses_unsound_blocks() {
        for (name, bytes) in [("", 4096), ("a\nb", 4096), ("a", 4095), ("a", (1 << 44) + 4096)] {
            assert!(Blocks::new([block(name, bytes)]).is_err(), "{name:?} {bytes}");
        }
        assert!(Blocks::new([block("a", 1 << 44)]).is_ok());
        assert!(Blocks::new([block("a", 4096), block("a", 4096)]).is_err());
        let many = (0..=BLOCKS_MAX).map(|nth| block(&nth.to_string(), 4096));
        assert_eq!(Blocks::new(many), Err(StreamError::TooManyBlocks));
    }
}
