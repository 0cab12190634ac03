//! A fixed address range into which files are mapped, many at a time.
//!
//! Mapping each file at an arbitrary address makes reading `/proc/self/pagemap` slow on Linux 6.1:
//! it takes ten times as long with a thousand mappings that are far apart.

#![expect(unsafe_code, reason = "files are mapped over one range of addresses")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::with_exposed_provenance_mut;

use cachemap::PAGE_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The most pages mapped at a time: 128 MiB, which takes 256 KiB of page tables.
pub(crate) const PAGES: usize = 32 << 10;
/// [`PAGE_BYTES`] as a `usize`, for addresses.
pub(crate) const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

/// The range, and how many of its pages have files behind them. The program never reads or writes
/// through these addresses: only the kernel looks at them.
#[derive(Debug)]
pub(crate) struct Arena {
    address: usize,
    used: usize,
}

impl Arena {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let bytes = PAGES * PAGE;
        // SAFETY: no address is requested, so no existing mapping changes.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)
        }?;
        Ok(Self { address: base.expose_provenance(), used: 0 })
    }

    /// The number of pages that can still be mapped.
    pub(crate) fn room(&self) -> usize {
        PAGES - self.used
    }

    /// The address of the first page.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// The number of mapped pages.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Maps `pages` pages of a file after those already mapped; returns the first one's index.
    pub(crate) fn map(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        pages: usize,
    ) -> io::Result<usize> {
        if pages > self.room() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let at = self.used;
        let to = with_exposed_provenance_mut(self.address + at * PAGE);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range lies within the arena, which is ours and to which no reference exists,
        // so it may be replaced.
        unsafe { rustix::mm::mmap(to, pages * PAGE, ProtFlags::READ, flags, file, offset) }?;
        self.used += pages;
        Ok(at)
    }

    /// Advises the kernel how the mapped pages are going to be used.
    fn advise(&self, advice: Advice) -> io::Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        let base = with_exposed_provenance_mut(self.address);
        // SAFETY: the range is within the arena, and neither advice that this is called with
        // changes its content.
        unsafe { rustix::mm::madvise(base, self.used * PAGE, advice) }?;
        Ok(())
    }

    /// Turns readahead off, so that touching a page reads no other.
    pub(crate) fn expect_random(&self) -> io::Result<()> {
        self.advise(Advice::Random)
    }

    /// Whether each mapped page is in the page cache.
    pub(crate) fn cached(&self, cached: &mut Vec<u8>) -> io::Result<()> {
        cached.clear();
        cached.resize(self.used, 0);
        if self.used == 0 {
            return Ok(());
        }
        let base = with_exposed_provenance_mut(self.address);
        // SAFETY: the range is within the arena, and the vector has a byte for each
        // of its pages.
        match unsafe { libc::mincore(base, self.used * PAGE, cached.as_mut_ptr()) } {
            0 => {
                for byte in cached {
                    *byte &= 1;
                }
                Ok(())
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Unmaps all files. With this advice, the kernel doesn't mark their pages as accessed.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        self.advise(Advice::Sequential)?;
        let base = with_exposed_provenance_mut(self.address);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range lies within the arena, as in `map`.
        unsafe { rustix::mm::mmap_anonymous(base, self.used * PAGE, ProtFlags::empty(), flags) }?;
        self.used = 0;
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let base = with_exposed_provenance_mut(self.address);
        // SAFETY: the range is the one that was mapped, and no reference into it
        // was ever made.
        let unmapped = unsafe { rustix::mm::munmap(base, PAGES * PAGE) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_are_mapped_side_by_side_and_unmapped() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 3 * PAGE]).unwrap();
        let mut arena = Arena::new().unwrap();
        let mut cached = Vec::new();
        for _ in 0..3 {
            assert_eq!(arena.map(file.as_fd(), 0, 3).unwrap(), 0);
            assert_eq!(arena.map(file.as_fd(), PAGE as u64, 2).unwrap(), 3);
            assert!(arena.map(file.as_fd(), 0, PAGES).is_err());
            arena.expect_random().unwrap();
            arena.cached(&mut cached).unwrap();
            assert_eq!(cached, [1; 5], "what was just written is in the cache");
            arena.clear().unwrap();
            assert_eq!(arena.used(), 0);
        }
        arena.cached(&mut cached).unwrap();
        assert!(cached.is_empty());
    }
}
