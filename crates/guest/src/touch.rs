//! Makes the kernel map cached pages at our addresses.
//!
//! Reading them would do that, but a file may be truncated meanwhile, and reading beyond its end
//! raises a fatal signal. So the kernel copies a byte of each into a pipe, which returns an error
//! code for a missing page. (`MADV_POPULATE_READ` would return one too, but it marks the pages as
//! accessed.)

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::with_exposed_provenance_mut;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// Bytes written to the pipe at once, which is the kernel's limit of pieces.
const AT_ONCE: usize = 1024;

/// Touches pages through a pipe.
#[derive(Debug)]
pub(crate) struct Toucher {
    from: OwnedFd,
    to: OwnedFd,
    pieces: Vec<libc::iovec>,
    drained: Vec<u8>,
}

impl Toucher {
    pub(crate) fn new() -> io::Result<Self> {
        let (from, to) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?;
        let drained = vec![0; 4096];
        Ok(Self { from, to, pieces: Vec::with_capacity(AT_ONCE), drained })
    }

    /// Touches these addresses, at which pages are or were mapped. Pages that can't be touched are
    /// skipped.
    pub(crate) fn touch(&mut self, addresses: impl Iterator<Item = usize>) -> io::Result<()> {
        for address in addresses {
            let iov_base = with_exposed_provenance_mut(address);
            self.pieces.push(libc::iovec { iov_base, iov_len: 1 });
            if self.pieces.len() == AT_ONCE {
                self.flush()?;
            }
        }
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        let pieces = std::mem::take(&mut self.pieces);
        self.write(&pieces)?;
        self.pieces = pieces;
        self.pieces.clear();
        Ok(())
    }

    /// Splits the pieces in halves if one can't be read: the kernel doesn't report which.
    #[expect(unsafe_code, reason = "the kernel reads at addresses that may be gone")]
    fn write(&mut self, pieces: &[libc::iovec]) -> io::Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the kernel reads a byte at each address, and returns an error if it can't. The
        // addresses belong to the arena's mappings of files, to which no reference exists.
        let written = unsafe { libc::writev(self.to.as_raw_fd(), pieces.as_ptr(), count) };
        let error = io::Error::last_os_error();
        self.drain()?;
        match usize::try_from(written) {
            Ok(written) if written >= pieces.len() => Ok(()),
            Ok(written) if written > 0 => self.write(pieces.get(written..).unwrap_or_default()),
            Err(_) if error.raw_os_error() != Some(libc::EFAULT) => Err(error),
            _ if pieces.len() == 1 => Ok(()),
            _ => {
                let (first, second) = pieces.split_at(pieces.len() / 2);
                self.write(first)?;
                self.write(second)
            }
        }
    }

    fn drain(&mut self) -> io::Result<()> {
        loop {
            match rustix::io::read(&self.from, &mut self.drained[..]) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;
    use crate::arena::Arena;
    use crate::pagemap::Pagemap;

    #[test]
    fn touched_pages_are_mapped_unless_the_file_was_truncated() {
        const PAGES: usize = 3000;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; PAGES * 4096]).unwrap();
        let mut arena = Arena::new().unwrap();
        arena.map(file.as_fd(), 0, PAGES).unwrap();
        // The file is truncated while it is mapped.
        file.set_len(2000 * 4096).unwrap();
        let base = arena.address();
        Toucher::new().unwrap().touch((0..PAGES).map(|page| base + page * 4096)).unwrap();
        let mut pages = vec![None; PAGES];
        Pagemap::open().unwrap().read(base, &mut pages).unwrap();
        assert!(pages[..2000].iter().all(Option::is_some));
        assert!(pages[2000..].iter().all(Option::is_none));
    }
}
