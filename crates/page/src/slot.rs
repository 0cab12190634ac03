//! The buffers of one batch, of pages or of blocks, and what is recorded of their content.

use crate::{Buffer, PAGE_BYTES, PageIndex};

/// Most page bodies in one batch: as many as one multifd packet of QEMU carries.
pub const BATCH_PAGES: usize = 128;

/// Bytes of a batch's buffer.
///
/// 128 bodies as classic records take 128 x (8 + 4,096) bytes, and one block name takes
/// 1 + 255. The rest is room for the records between them, so that the tap can parse a
/// classic stream in the buffer that it read into.
pub const SLOT_BYTES: usize = 544 * 1024;
const _: () = assert!(SLOT_BYTES > BATCH_PAGES * (8 + PAGE_BYTES) + 256);

/// A page whose bytes are in the batch's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body {
    /// Which page.
    pub page: PageIndex,
    /// Where its [`PAGE_BYTES`] bytes start in the buffer.
    pub at: u32,
}

/// A run of pages that each repeat one byte, nearly always zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// The first page of the run.
    pub first: PageIndex,
    /// How many pages.
    pub count: u32,
    /// The byte that is repeated.
    pub byte: u8,
}

/// A piece of a disk that is all data or all zero, starting where the extent
/// before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub bytes: u32,
    /// Whether it is all zero, with no bytes in the buffer.
    pub zero: bool,
}

/// The buffers of a batch, which the pool keeps for the next one.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) bytes: Buffer,
    pub(crate) bodies: Vec<Body>,
    pub(crate) fills: Vec<Fill>,
    pub(crate) extents: Vec<Extent>,
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self {
            bytes: Buffer::new(SLOT_BYTES),
            bodies: Vec::with_capacity(BATCH_PAGES),
            fills: Vec::with_capacity(BATCH_PAGES),
            extents: Vec::new(),
        }
    }

    /// Forgets the content, and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.bodies.clear();
        self.fills.clear();
        self.extents.clear();
    }
}
