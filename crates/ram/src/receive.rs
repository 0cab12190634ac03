//! Bytes from a socket straight into RAM.
//!
//! Page bodies that come uncompressed are copied once, by the kernel, from the
//! socket to where the guest will read them. The batch says where each page
//! goes; pages that are out of date are thrown away on the same way, into a
//! scratch buffer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Mapping, RamError};

/// The most addresses given to the kernel at once. A batch's 128 pages fit
/// with room; the kernel itself takes 1,024.
const ADDRESSES_MAX: usize = 256;

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
    /// Into the scratch buffer, whose content means nothing afterwards: each
    /// such piece begins at its start.
    Scratch {
        /// How many bytes, at most the buffer's length.
        bytes: usize,
    },
}

impl Piece {
    fn bytes(self) -> usize {
        match self {
            Self::Ram { bytes, .. } | Self::Scratch { bytes } => bytes,
        }
    }
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
    /// [`RamError::OutOfRange`] or [`RamError::ScratchTooSmall`] before the
    /// first byte is taken. [`RamError::Receive`] if the connection ended or
    /// failed: some of the pieces may then have been written.
    pub fn receive_ready(
        &self,
        socket: BorrowedFd<'_>,
        pieces: &[Piece],
        scratch: &mut [u8],
    ) -> Result<usize, RamError> {
        for &piece in pieces {
            self.target(piece, 0, scratch)?;
        }
        let mut left = Left { pieces, taken: 0 };
        let mut total = 0;
        loop {
            let mut targets = Targets::new();
            self.collect(left, scratch, &mut targets)?;
            if targets.count == 0 {
                return Ok(total);
            }
            match receive_some(socket, &mut targets) {
                Ok(0) => return Err(ended()),
                Ok(bytes) => {
                    total += bytes;
                    left.take(bytes);
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => return Ok(total),
                    // Pages that can't be had are a signal to whoever touches
                    // them, but an error code to a system call.
                    Some(libc::EFAULT | libc::ENOMEM) => return Err(RamError::NoMemory),
                    _ => return Err(RamError::Receive { source: error }),
                },
            }
        }
    }

    /// Addresses for as many of the pieces that are left as fit one call.
    fn collect(
        &self,
        left: Left<'_>,
        scratch: &mut [u8],
        targets: &mut Targets,
    ) -> Result<(), RamError> {
        let mut taken = left.taken;
        for &piece in left.pieces {
            let address = self.target(piece, taken, scratch)?;
            if !targets.push(address, piece.bytes() - taken) {
                break;
            }
            taken = 0;
        }
        Ok(())
    }

    /// The address of a piece's byte number `taken`.
    fn target(&self, piece: Piece, taken: usize, scratch: &mut [u8]) -> Result<*mut u8, RamError> {
        match piece {
            Piece::Ram { offset, bytes } => {
                self.address(offset, bytes)?;
                self.address(offset + taken as u64, bytes - taken)
            }
            Piece::Scratch { bytes } => match scratch.get_mut(taken..bytes) {
                Some(scratch) => Ok(scratch.as_mut_ptr()),
                None => Err(RamError::ScratchTooSmall { bytes, scratch_bytes: scratch.len() }),
            },
        }
    }
}

/// Pieces still to be received; `taken` bytes of the first are here already.
#[derive(Clone, Copy)]
struct Left<'p> {
    pieces: &'p [Piece],
    taken: usize,
}

impl Left<'_> {
    fn take(&mut self, bytes: usize) {
        self.taken += bytes;
        while let Some((first, rest)) = self.pieces.split_first()
            && self.taken >= first.bytes()
        {
            self.taken -= first.bytes();
            self.pieces = rest;
        }
    }
}

/// Addresses and lengths for one call to the kernel. Pages that follow one
/// another in RAM are one of them.
struct Targets {
    vectors: [libc::iovec; ADDRESSES_MAX],
    count: usize,
}

impl Targets {
    fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { vectors: [empty; ADDRESSES_MAX], count: 0 }
    }

    /// Whether there was room.
    fn push(&mut self, address: *mut u8, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        if let Some(last) = self.count.checked_sub(1).and_then(|at| self.vectors.get_mut(at))
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == address
        {
            last.iov_len += bytes;
            return true;
        }
        let Some(vector) = self.vectors.get_mut(self.count) else { return false };
        *vector = libc::iovec { iov_base: address.cast(), iov_len: bytes };
        self.count += 1;
        true
    }
}

fn receive_some(socket: BorrowedFd<'_>, targets: &mut Targets) -> io::Result<usize> {
    // SAFETY: a message header of zeros is a valid one: no name, no vectors, no
    // control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = targets.vectors.as_mut_ptr();
    header.msg_iovlen = targets.count;
    // SAFETY: `vectors` has `count` entries, each the address and length of
    // mapped RAM or of the scratch buffer that the caller holds exclusively,
    // both checked by `Mapping::target`, and both alive during the call.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::RamFile;

    const PAGE: usize = 4096;

    fn mapping(pages: usize) -> Mapping {
        Mapping::new(&RamFile::create("ram-test", (pages * PAGE) as u64, None).unwrap()).unwrap()
    }

    fn ram(page: usize) -> Piece {
        Piece::Ram { offset: (page * PAGE) as u64, bytes: PAGE }
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
            .map(|n| if n % 7 == 0 { Piece::Scratch { bytes: PAGE } } else { ram(2 * n) })
            .collect();
        let sending = thread::spawn(move || {
            let content: Vec<u8> = (0..PAGES).flat_map(|n| [n.to_le_bytes()[0]; PAGE]).collect();
            for chunk in content.chunks(10_007) {
                sender.write_all(chunk).unwrap();
            }
        });
        let mut scratch = vec![0; PAGE];
        let mut left = Left { pieces: &pieces, taken: 0 };
        while !left.pieces.is_empty() {
            await_bytes(receiver.as_fd()).unwrap();
            // Continue within a page, as the placer does.
            let mut rest = left.pieces.to_vec();
            if let Piece::Ram { offset, bytes } = rest[0] {
                let taken = left.taken;
                rest[0] = Piece::Ram { offset: offset + taken as u64, bytes: bytes - taken };
            } else {
                rest[0] = Piece::Scratch { bytes: PAGE - left.taken };
            }
            let bytes = mapping.receive_ready(receiver.as_fd(), &rest, &mut scratch).unwrap();
            left.take(bytes);
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
        let mut scratch = vec![0; PAGE];
        for bad in [ram(1), Piece::Ram { offset: u64::MAX, bytes: 2 }] {
            let refused = mapping.receive_ready(receiver.as_fd(), &[ram(0), bad], &mut scratch);
            assert!(matches!(refused, Err(RamError::OutOfRange { .. })), "{refused:?}");
        }
        let bad = Piece::Scratch { bytes: PAGE + 1 };
        let refused = mapping.receive_ready(receiver.as_fd(), &[ram(0), bad], &mut scratch);
        assert!(matches!(refused, Err(RamError::ScratchTooSmall { .. })), "{refused:?}");
        assert_eq!(mapping.file().allocated_bytes().unwrap(), 0);
        let all = [ram(0), Piece::Scratch { bytes: 0 }, Piece::Scratch { bytes: PAGE }];
        let taken = mapping.receive_ready(receiver.as_fd(), &all, &mut scratch).unwrap();
        assert_eq!(taken, 2 * PAGE);
    }

    #[test]
    fn an_end_within_a_page_and_silence_are_errors_of_the_connection() {
        let mapping = mapping(1);
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let Err(RamError::Receive { source }) = await_bytes(receiver.as_fd()) else { panic!() };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut);
        sender.write_all(&[1; 100]).unwrap();
        assert_eq!(mapping.receive_ready(receiver.as_fd(), &[ram(0)], &mut []).unwrap(), 100);
        drop(sender);
        let Err(RamError::Receive { source }) = await_bytes(receiver.as_fd()) else { panic!() };
        assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
        let rest = [Piece::Ram { offset: 100, bytes: PAGE - 100 }];
        let Err(RamError::Receive { source }) =
            mapping.receive_ready(receiver.as_fd(), &rest, &mut [])
        else {
            panic!()
        };
        assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
    }
}
