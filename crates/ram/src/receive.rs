//! Bytes from a socket into RAM.
//!
//! Page bodies that come uncompressed are received in one piece into a buffer
//! of the thread, and the kernel copies them from there to where the batch says:
//! one call for the whole batch. Pages that are out of date are left out.

use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::{RecvFlags, recv};

use crate::mapping::local;
use crate::{Mapping, RamError};

/// Where the next bytes of a socket go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Into the RAM.
    Ram {
        /// The first byte's place.
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

thread_local! {
    /// Received and not yet placed; grows to a batch's bodies once.
    static RECEIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Waits until `socket` has bytes to read, or fails, as long as its own
/// receive timeout allows.
///
/// # Errors
/// [`RamError::Receive`]: the connection ended, failed, or was silent for its
/// receive timeout.
pub fn await_bytes(socket: BorrowedFd<'_>) -> Result<(), RamError> {
    let mut byte = [0_u8; 1];
    // Looking at one byte without taking it, unlike poll, keeps to the socket's
    // timeout and tells an end from bytes, all in one call.
    let peeked = rustix::io::retry_on_intr(|| {
        rustix::net::recv(socket, &mut byte, rustix::net::RecvFlags::PEEK)
    });
    match peeked {
        Ok((0, _)) => Err(ended()),
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::AGAIN) => Err(RamError::Receive {
            source: io::Error::new(io::ErrorKind::TimedOut, "no bytes within the timeout"),
        }),
        Err(errno) => Err(RamError::Receive { source: errno.into() }),
    }
}

fn ended() -> RamError {
    let message = "the connection ended within a page";
    RamError::Receive { source: io::Error::new(io::ErrorKind::UnexpectedEof, message) }
}

impl Mapping {
    /// Moves what `socket` holds right now to where `pieces` say, and returns
    /// how many bytes that were: as many as the pieces have together, or fewer
    /// if the rest has not come yet. It never waits; [`await_bytes`] does.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`] before the first byte is taken.
    /// [`RamError::Receive`] if the connection ended or failed. What came before
    /// may have been written.
    pub fn receive_ready(
        &self,
        socket: BorrowedFd<'_>,
        pieces: &[Piece],
    ) -> Result<usize, RamError> {
        let total = self.check(pieces)?;
        RECEIVED.with_borrow_mut(|buffer| {
            if buffer.len() < total {
                buffer.resize(total, 0);
            }
            let received = receive_some(socket, &mut buffer[..total])?;
            self.place(&buffer[..received], pieces)?;
            Ok(received)
        })
    }

    /// Copies `bytes`, which have as many as the pieces together, to where those
    /// say: one call to the kernel for a whole batch.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing written; or the kernel's.
    pub fn write_pieces(&self, bytes: &[u8], pieces: &[Piece]) -> Result<(), RamError> {
        self.check(pieces)?;
        self.place(bytes, pieces)
    }

    /// Copies the bytes at `offsets`, as many of each as `into` has room for,
    /// one after the other into `into`: one call to the kernel for a batch.
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

    /// How many bytes the pieces have, which lie all inside.
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

    /// Copies `received` to the first pieces.
    fn place(&self, received: &[u8], pieces: &[Piece]) -> Result<(), RamError> {
        let mut here = Vectors::new();
        let mut there = Vectors::new();
        let mut rest = received;
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

/// Bytes that are there, at most as many as fit. An end before the first is an
/// error: whoever asks expects more.
fn receive_some(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, RamError> {
    let mut received = 0;
    while received < buffer.len() {
        match recv(socket, &mut buffer[received..], RecvFlags::DONTWAIT) {
            Ok((0, _)) if received == 0 => return Err(ended()),
            Ok((0, _)) | Err(rustix::io::Errno::AGAIN) => break,
            Ok((bytes, _)) => received += bytes,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(RamError::Receive { source: errno.into() }),
        }
    }
    Ok(received)
}

/// Pieces for one call to the kernel. Those that follow one another are one.
struct Vectors {
    list: [libc::iovec; VECTORS_MAX],
    count: usize,
}

/// A batch has 128 pages.
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
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

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
        // More places than one call takes, some of them neighbours.
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
    fn pages_land_where_the_pieces_say_however_the_bytes_come() {
        const PAGES: usize = 700;
        let mapping = mapping(2 * PAGES);
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        // Every other page, so that none merge; every seventh goes nowhere.
        let pieces: Vec<_> = (0..PAGES)
            .map(|n| if n % 7 == 0 { Piece::Drop { bytes: PAGE } } else { ram(2 * n) })
            .collect();
        let sending = thread::spawn(move || {
            let content: Vec<u8> = (0..PAGES).flat_map(|n| [n.to_le_bytes()[0]; PAGE]).collect();
            for chunk in content.chunks(10_007) {
                sender.write_all(chunk).unwrap();
            }
        });
        let mut received = 0;
        while received < PAGES * PAGE {
            await_bytes(receiver.as_fd()).unwrap();
            // Continue within a page, as the placer does.
            let mut rest = pieces[received / PAGE..].to_vec();
            let taken = received % PAGE;
            rest[0] = match rest[0] {
                Piece::Ram { offset, bytes } => {
                    Piece::Ram { offset: offset + taken as u64, bytes: bytes - taken }
                }
                Piece::Drop { bytes } => Piece::Drop { bytes: bytes - taken },
            };
            received += mapping.receive_ready(receiver.as_fd(), &rest).unwrap();
        }
        sending.join().unwrap();
        for n in 0..PAGES {
            let expected = if n % 7 == 0 { 0 } else { n.to_le_bytes()[0] };
            assert_eq!(page_at(&mapping, 2 * n), [expected; PAGE], "page {n}");
            assert_eq!(page_at(&mapping, 2 * n + 1), [0; PAGE]);
        }
    }

    #[test]
    fn nothing_is_taken_for_a_piece_that_is_not_inside() {
        let mapping = mapping(1);
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        sender.write_all(&[1; 2 * PAGE]).unwrap();
        for bad in [ram(1), Piece::Ram { offset: u64::MAX, bytes: 2 }] {
            let refused = mapping.receive_ready(receiver.as_fd(), &[ram(0), bad]);
            assert!(matches!(refused, Err(RamError::OutOfRange { .. })), "{refused:?}");
        }
        assert_eq!(page_at(&mapping, 0), [0; PAGE]);
        let all = [ram(0), Piece::Drop { bytes: 0 }, Piece::Drop { bytes: PAGE }];
        assert_eq!(mapping.receive_ready(receiver.as_fd(), &all).unwrap(), 2 * PAGE);
        assert_eq!(page_at(&mapping, 0), [1; PAGE]);
    }

    #[test]
    fn an_end_within_a_page_and_silence_are_errors_of_the_connection() {
        let mapping = mapping(1);
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let Err(RamError::Receive { source }) = await_bytes(receiver.as_fd()) else { panic!() };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut);
        sender.write_all(&[1; 100]).unwrap();
        assert_eq!(mapping.receive_ready(receiver.as_fd(), &[ram(0)]).unwrap(), 100);
        drop(sender);
        let Err(RamError::Receive { source }) = await_bytes(receiver.as_fd()) else { panic!() };
        assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
        let rest = [Piece::Ram { offset: 100, bytes: PAGE - 100 }];
        let Err(RamError::Receive { source }) = mapping.receive_ready(receiver.as_fd(), &rest)
        else {
            panic!()
        };
        assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
    }
}
