//! Copies a batch's pages to and from their places in RAM, with one system call
//! for all of them. Stale pages are left out.

use crate::mapping::local;
use crate::{Mapping, RamError};

/// The destination of the next bytes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Into the RAM.
    Ram {
        /// The first byte's offset.
        offset: u64,
        /// How many bytes.
        bytes: usize,
    },
    /// Nowhere.
    Drop {
        /// How many bytes.
        bytes: usize,
    },
}

impl Piece {
    fn bytes(self) -> usize {
        match self {
            Self::Ram { bytes, .. } | Self::Drop { bytes } => bytes,
        }
    }
}

impl Mapping {
    /// Copies `bytes` to the places of the pieces, which have the same total
    /// length: one system call for a whole batch.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing written; or the kernel's error.
    pub fn write_pieces(&self, bytes: &[u8], pieces: &[Piece]) -> Result<(), RamError> {
        self.check(pieces)?;
        self.place(bytes, pieces)
    }

    /// Copies the bytes at `offsets`, an equal share of `into` each, one after
    /// the other: one system call for a batch.
    ///
    /// # Errors
    /// As [`Mapping::read`].
    pub fn gather(
        &self,
        offsets: impl ExactSizeIterator<Item = u64>,
        into: &mut [u8],
    ) -> Result<(), RamError> {
        let each = into.len() / offsets.len().max(1);
        let mut there = Vectors::new();
        let mut rest = into;
        for offset in offsets {
            if there.is_full() {
                let (now, after) = rest.split_at_mut(there.bytes());
                self.gather_once(there.take(), now)?;
                rest = after;
            }
            there.push(self.remote(offset, each)?);
        }
        let now = there.bytes();
        self.gather_once(there.take(), &mut rest[..now])
    }

    /// Checks that all pieces are inside, and returns their total length.
    fn check(&self, pieces: &[Piece]) -> Result<usize, RamError> {
        let mut total = 0;
        for &piece in pieces {
            if let Piece::Ram { offset, bytes } = piece {
                self.remote(offset, bytes)?;
            }
            total += piece.bytes();
        }
        Ok(total)
    }

    fn place(&self, bytes: &[u8], pieces: &[Piece]) -> Result<(), RamError> {
        let mut here = Vectors::new();
        let mut there = Vectors::new();
        let mut rest = bytes;
        for &piece in pieces {
            let (now, after) = rest.split_at(piece.bytes().min(rest.len()));
            rest = after;
            let Piece::Ram { offset, .. } = piece else { continue };
            if now.is_empty() {
                break;
            }
            if here.is_full() || there.is_full() {
                self.scatter(here.take(), there.take())?;
            }
            here.push(local(now));
            there.push(self.remote(offset, now.len())?);
        }
        self.scatter(here.take(), there.take())
    }
}

/// Pieces for one system call. Adjacent ones are merged.
struct Vectors {
    list: [libc::iovec; VECTORS_MAX],
    count: usize,
}

/// Enough for a batch of 128 pages.
const VECTORS_MAX: usize = 256;

impl Vectors {
    fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { list: [empty; VECTORS_MAX], count: 0 }
    }

    fn is_full(&self) -> bool {
        self.count == VECTORS_MAX
    }

    fn push(&mut self, piece: libc::iovec) {
        if let Some(last) = self.list[..self.count].last_mut()
            && last.iov_base.wrapping_byte_add(last.iov_len) == piece.iov_base
        {
            last.iov_len += piece.iov_len;
            return;
        }
        self.list[self.count] = piece;
        self.count += 1;
    }

    fn bytes(&self) -> usize {
        self.list[..self.count].iter().map(|piece| piece.iov_len).sum()
    }

    fn take(&mut self) -> &mut [libc::iovec] {
        let count = std::mem::take(&mut self.count);
        &mut self.list[..count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn mapping(pages: usize) -> Mapping {
        Mapping::own((pages * PAGE) as u64)
    }

    fn ram(page: usize) -> Piece {
        Piece::Ram { offset: (page * PAGE) as u64, bytes: PAGE }
    }

    #[test]
    fn scattered_pages_are_gathered_in_the_order_asked_for() {
        let mapping = mapping(600);
        for page in 0..600_u64 {
            mapping.write(page * PAGE as u64, &page.to_le_bytes()).unwrap();
        }
        // More places than one call takes, some of them adjacent.
        let asked: Vec<u64> = (0..300).map(|nth| nth * 7 % 600).chain([8, 9, 10]).collect();
        let mut bytes = vec![0; asked.len() * PAGE];
        mapping.gather(asked.iter().map(|page| page * PAGE as u64), &mut bytes).unwrap();
        for (page, bytes) in asked.iter().zip(bytes.chunks(PAGE)) {
            assert_eq!(bytes[..8], page.to_le_bytes());
        }
        let outside = mapping.gather([600 * PAGE as u64].into_iter(), &mut bytes[..PAGE]);
        assert!(matches!(outside, Err(RamError::OutOfRange { .. })));
    }

    fn page_at(mapping: &Mapping, page: usize) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        mapping.read((page * PAGE) as u64, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn pages_land_where_the_pieces_say() {
        const PAGES: usize = 700;
        let mapping = mapping(2 * PAGES);
        // Every other page, so that none merge; every seventh is dropped.
        let pieces: Vec<_> = (0..PAGES)
            .map(|n| if n % 7 == 0 { Piece::Drop { bytes: PAGE } } else { ram(2 * n) })
            .collect();
        let content: Vec<u8> = (0..PAGES).flat_map(|n| [n.to_le_bytes()[0]; PAGE]).collect();
        mapping.write_pieces(&content, &pieces).unwrap();
        for n in 0..PAGES {
            let expected = if n % 7 == 0 { 0 } else { n.to_le_bytes()[0] };
            assert_eq!(page_at(&mapping, 2 * n), [expected; PAGE], "page {n}");
            assert_eq!(page_at(&mapping, 2 * n + 1), [0; PAGE]);
        }
    }

    #[test]
    fn nothing_is_written_if_a_piece_is_not_inside() {
        let mapping = mapping(1);
        let bytes = vec![1; 2 * PAGE];
        for bad in [ram(1), Piece::Ram { offset: u64::MAX, bytes: 2 }] {
            let refused = mapping.write_pieces(&bytes, &[ram(0), bad]);
            assert!(matches!(refused, Err(RamError::OutOfRange { .. })), "{refused:?}");
        }
        assert_eq!(page_at(&mapping, 0), [0; PAGE]);
        let all = [ram(0), Piece::Drop { bytes: 0 }, Piece::Drop { bytes: PAGE }];
        mapping.write_pieces(&bytes, &all).unwrap();
        assert_eq!(page_at(&mapping, 0), [1; PAGE]);
    }
}
