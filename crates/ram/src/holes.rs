//! Memory that reading allocates: holes of a file in memory, a memfd or one on tmpfs.

use std::ops::Range;

use crate::backing::areas;
use crate::pagemap::{self, PAGE_BYTES};
use crate::{Mapping, RamError};

impl Mapping {
    /// The holes of an in-memory file, in order. Anonymous memory has none, because it
    /// reads as the kernel's one zero page; a file that can't be examined counts as having
    /// none.
    ///
    /// # Errors
    /// If QEMU has ended.
    pub fn holes_in_memory(&self) -> Result<Vec<Range<u64>>, RamError> {
        let ours = self.base()..self.base() + self.bytes();
        let areas = areas(self.pid()).map_err(|error| pagemap::lost(self.pid(), error))?;
        let of = |area: &Range<u64>| area.start < ours.end && ours.start < area.end;
        let mut holes = Vec::new();
        for area in areas.iter().filter(|area| of(&area.addresses)) {
            for hole in area.holes_in_memory(self.pid()) {
                let (start, end) = (hole.start.max(ours.start), hole.end.min(ours.end));
                if start < end {
                    holes.push(start - ours.start..end - ours.start);
                }
            }
        }
        self.still_there().map(|()| holes)
    }

    /// Makes the kernel allocate memory for all pages of `range`, as QEMU would by reading
    /// them; their content does not change.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], or the kernel's error if memory runs out.
    pub fn prefault(&self, range: Range<u64>) -> Result<(), RamError> {
        let mut bytes = [0; PAGES_MAX];
        let mut at = range.start;
        while at < range.end {
            let pages = (range.end - at).div_ceil(PAGE_BYTES).min(PAGES_MAX as u64);
            let into = &mut bytes[..usize::try_from(pages).unwrap_or(PAGES_MAX)];
            self.gather((0..into.len()).map(|page| at + page as u64 * PAGE_BYTES), into)?;
            at += pages * PAGE_BYTES;
        }
        Ok(())
    }
}

/// Pages read in one system call, a byte of each.
const PAGES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    #[expect(unsafe_code, reason = "memory is mapped by hand")]
    fn holes_of_a_memfd_get_memory_and_keep_their_zeros() {
        let bytes = 8 * MIB;
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        let file = File::from(fd);
        file.write_all_at(&[7; 4096], 2 * MIB).unwrap();
        let len = usize::try_from(bytes).unwrap();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: no address is requested, and no reference into it exists.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) }.unwrap();
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let us = std::process::id();
        let mapping = Mapping::of_process(pidfd.as_fd(), us, base as u64 + MIB, 6 * MIB).unwrap();
        // `of_process` has read its first byte.
        let holes = mapping.holes_in_memory().unwrap();
        assert_eq!(holes, [4096..MIB, MIB + 4096..6 * MIB]);
        mapping.prefault(MIB + 4096..5 * MIB).unwrap();
        assert_eq!(mapping.holes_in_memory().unwrap(), [4096..MIB, 5 * MIB..6 * MIB]);
        let mut present = vec![false; 4 * 256];
        mapping.present(MIB, &mut present).unwrap();
        assert!(present[1..].iter().all(|present| *present), "also in the process's page tables");
        let (mut content, mut expected) = (vec![1; 6 << 20], vec![0; 6 << 20]);
        expected[1 << 20..][..4096].fill(7);
        mapping.read(0, &mut content).unwrap();
        assert!(content == expected);
        assert!(matches!(mapping.prefault(0..7 * MIB), Err(RamError::OutOfRange { .. })));
        drop(mapping);
        // SAFETY: this is the range that was mapped.
        unsafe { munmap(base, len) }.unwrap();
    }

    #[test]
    fn anonymous_memory_has_no_holes() {
        assert_eq!(Mapping::own(8 * MIB).holes_in_memory().unwrap(), []);
    }
}
