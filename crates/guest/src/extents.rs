//! Finds a file's blocks on disk with the kernel's `FIEMAP`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use cachemap::{PAGE_BYTES, Reason, SECTOR_BYTES};

/// `_IOWR('f', 11, struct fiemap)`.
const FIEMAP: libc::Ioctl = 0xc020_660b;
/// Extents that are requested at once.
const AT_ONCE: usize = 128;

const LAST: u32 = 1;
/// UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL and UNWRITTEN:
/// the device doesn't hold there what a reader of the file gets.
const REFUSED: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    logical: u64,
    physical: u64,
    length: u64,
    reserved_wide: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// The kernel's `struct fiemap`, with its array.
#[repr(C)]
struct Question {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    entries: [Entry; AT_ONCE],
}

/// A part of a file that is contiguous on its device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    logical: u64,
    physical: u64,
    length: u64,
}

impl Piece {
    fn end(&self) -> u64 {
        self.logical.saturating_add(self.length)
    }

    fn is_followed_by(&self, next: &Self) -> bool {
        self.end() == next.logical && self.physical.checked_add(self.length) == Some(next.physical)
    }
}

/// The first sector of a file's page, counted on the file system's device, or why it has none.
pub(crate) type Sector = Result<u64, Reason>;

/// Requests extents; owns the buffer for the answer.
pub(crate) struct Extents(Box<Question>);

impl Extents {
    pub(crate) fn new() -> Self {
        let entries = [Entry::default(); AT_ONCE];
        let question =
            Question { start: 0, length: 0, flags: 0, mapped: 0, count: 0, reserved: 0, entries };
        Self(Box::new(question))
    }

    /// Fills `sectors` with the places of a file's pages from `offset` on. It writes nothing to
    /// disk: a page that is not allocated yet has no place.
    pub(crate) fn place(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        sectors: &mut [Sector],
    ) -> io::Result<()> {
        sectors.fill(Err(Reason::NoBlock));
        let end = offset.saturating_add(sectors.len() as u64 * PAGE_BYTES);
        let mut open: Option<Piece> = None;
        let mut start = offset;
        while start < end {
            let entries = self.ask(file, start, end - start)?;
            let is_last = entries.len() < AT_ONCE || entries.iter().any(|e| e.flags & LAST != 0);
            for entry in entries.iter().filter(|entry| entry.flags & REFUSED == 0) {
                let Entry { logical, physical, length, .. } = *entry;
                let piece = Piece { logical, physical, length };
                match &mut open {
                    Some(before) if before.is_followed_by(&piece) => before.length += length,
                    _ => {
                        if let Some(before) = open.replace(piece) {
                            put(&before, offset, sectors);
                        }
                    }
                }
            }
            let told =
                entries.last().map_or(end, |entry| entry.logical.saturating_add(entry.length));
            if is_last || told <= start {
                break;
            }
            start = told;
        }
        if let Some(piece) = open {
            put(&piece, offset, sectors);
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "rustix has no FIEMAP")]
    fn ask(&mut self, file: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<&[Entry]> {
        let question = &mut *self.0;
        (question.start, question.length) = (start, length);
        (question.flags, question.mapped, question.reserved) = (0, 0, 0);
        question.count = u32::try_from(AT_ONCE).unwrap_or(0);
        // SAFETY: the structure is laid out like the kernel's, and has as many entries as it says;
        // the kernel writes nothing else.
        if unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut *question) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mapped = usize::try_from(question.mapped).unwrap_or(0).min(AT_ONCE);
        Ok(question.entries.get(..mapped).unwrap_or_default())
    }
}

/// Notes the pages in a piece. A page that is only partly in it is scattered, wherever its other
/// parts are.
fn put(piece: &Piece, offset: u64, sectors: &mut [Sector]) {
    let range_end = offset + sectors.len() as u64 * PAGE_BYTES;
    let (start, end) = (piece.logical.max(offset), piece.end().min(range_end));
    if start >= end {
        return;
    }
    let index = |at: u64| usize::try_from((at - offset) / PAGE_BYTES).unwrap_or(usize::MAX);
    for (at, sector) in sectors.iter_mut().enumerate().take(index(end - 1) + 1).skip(index(start)) {
        let page = offset + at as u64 * PAGE_BYTES;
        let is_whole = piece.logical <= page && page + PAGE_BYTES <= piece.end();
        let physical = piece.physical.checked_add(page.wrapping_sub(piece.logical));
        let physical = physical.filter(|at| is_whole && at.is_multiple_of(SECTOR_BYTES));
        *sector = physical.map(|at| at / SECTOR_BYTES).ok_or(Reason::Scattered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: Sector = Err(Reason::NoBlock);
    const SPLIT: Sector = Err(Reason::Scattered);

    fn placed(pieces: &[(u64, u64, u64)], offset: u64) -> Vec<Sector> {
        let mut sectors = vec![NO; 4];
        for &(logical, physical, length) in pieces {
            put(&Piece { logical, physical, length }, offset, &mut sectors);
        }
        sectors
    }

    #[test]
    fn whole_pages_have_a_place() {
        let cases = [
            (vec![], 0, [NO, NO, NO, NO]),
            (vec![(0, 1 << 20, 16384)], 0, [Ok(2048), Ok(2056), Ok(2064), Ok(2072)]),
            (vec![(4096, 512, 8192)], 0, [NO, Ok(1), Ok(9), NO]),
            // From the middle of a file.
            (vec![(0, 0, 1 << 20)], 8192, [Ok(16), Ok(24), Ok(32), Ok(40)]),
            (vec![(1 << 30, 0, 4096)], 8192, [NO, NO, NO, NO]),
            // Blocks of 1 KiB: a page in two pieces, and a page that ends early.
            (vec![(0, 4096, 5120), (5120, 65536, 3072)], 0, [Ok(8), SPLIT, NO, NO]),
            (vec![(0, 4096, 4096 + 1024)], 0, [Ok(8), SPLIT, NO, NO]),
            (vec![(0, 100, 4096)], 0, [SPLIT, NO, NO, NO]),
            (vec![(u64::MAX - 100, 0, 4096)], 0, [NO, NO, NO, NO]),
            (vec![(0, u64::MAX, 16384)], 0, [SPLIT, SPLIT, SPLIT, SPLIT]),
        ];
        for (pieces, offset, expected) in cases {
            assert_eq!(placed(&pieces, offset), expected, "{pieces:?} from {offset}");
        }
    }

    #[test]
    fn layout_is_the_kernels() {
        assert_eq!((size_of::<Entry>(), size_of::<Question>()), (56, 32 + 56 * AT_ONCE));
    }
}
