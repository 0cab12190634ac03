//! The file behind RAM that more than one process has mapped.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::backing::shared_file;
use crate::{Mapping, RamError};

/// An open file with the content of RAM, whichever process has mapped it.
///
/// Reading it changes no process's page tables, and allocates no hole. It goes on when the process
/// has ended.
#[derive(Debug)]
pub struct RamFile {
    file: File,
    /// Where the RAM starts in it.
    start: u64,
    bytes: u64,
    /// The process in which it was found, for errors.
    pid: u32,
}

impl RamFile {
    /// Copies the bytes at `offset` into `into`.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], or the kernel's error.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let (bytes, size_bytes) = (into.len() as u64, self.bytes);
        if offset.checked_add(bytes).is_none_or(|end| end > size_bytes) {
            return Err(RamError::OutOfRange { offset, bytes, size_bytes });
        }
        let read = self.file.read_exact_at(into, self.start + offset);
        read.map_err(|source| RamError::Local { action: "reading", pid: self.pid, source })
    }
}

impl Mapping {
    /// The file behind all of it; none if that is not one file that is mapped as shared memory, or
    /// can't be opened.
    #[must_use]
    pub fn file(&self) -> Option<RamFile> {
        let addresses = self.base()..self.base() + self.bytes();
        let (file, start) = shared_file(self.pid(), &addresses)?;
        // The number may be another process's by now.
        self.still_there().ok()?;
        Some(RamFile { file, start, bytes: self.bytes(), pid: self.pid() })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    const PAGE: u64 = 4096;
    const PAGES: u64 = 16;
    /// Where the mapping starts in the file.
    const FIRST: u64 = 3;

    /// A file of 32 pages, of which 16 are mapped into this process as these `flags` say.
    struct Mapped {
        file: File,
        address: usize,
    }

    #[expect(unsafe_code, reason = "memory is mapped by hand")]
    impl Mapped {
        fn new(flags: MapFlags) -> Self {
            let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(2 * PAGES * PAGE).unwrap();
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let len = usize::try_from(PAGES * PAGE).unwrap();
            let start = FIRST * PAGE;
            // SAFETY: no address is requested, so no existing mapping changes.
            let base = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, &file, start) };
            Self { file, address: base.unwrap().expose_provenance() }
        }

        fn mapping(&self) -> Mapping {
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
            let (base, bytes) = (self.address as u64, PAGES * PAGE);
            Mapping::of_process(pidfd.as_fd(), std::process::id(), base, bytes).unwrap()
        }
    }

    #[expect(unsafe_code, reason = "unmaps what was mapped")]
    impl Drop for Mapped {
        fn drop(&mut self) {
            let base = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: the range is the one that was mapped, and no reference into it was ever
            // made.
            unsafe { munmap(base, usize::try_from(PAGES * PAGE).unwrap()) }.unwrap();
        }
    }

    #[test]
    fn a_shared_file_has_what_is_in_memory_and_keeps_its_holes() {
        let mapped = Mapped::new(MapFlags::SHARED);
        let mapping = mapped.mapping();
        mapping.write(5 * PAGE + 7, b"droveway").unwrap();
        let before = mapped.file.metadata().unwrap();
        let file = mapping.file().unwrap();
        let mut read = [0; 8];
        file.read(5 * PAGE + 7, &mut read).unwrap();
        assert_eq!(&read, b"droveway");
        let mut all = vec![1; usize::try_from(PAGES * PAGE).unwrap()];
        file.read(0, &mut all).unwrap();
        assert_eq!(all.iter().filter(|byte| **byte != 0).count(), 8);
        let after = mapped.file.metadata().unwrap();
        assert_eq!(after.blocks(), before.blocks(), "holes stay holes");
        for (offset, bytes) in [(PAGES * PAGE, 1), (PAGES * PAGE - 1, 2), (u64::MAX, 1)] {
            let refused = file.read(offset, &mut vec![0; bytes]).unwrap_err();
            assert!(matches!(refused, RamError::OutOfRange { .. }), "{refused}");
        }
        // It is still there when the memory is not.
        drop((mapping, mapped));
        file.read(5 * PAGE + 7, &mut read).unwrap();
        assert_eq!(&read, b"droveway");
    }

    #[test]
    fn other_memory_has_no_such_file() {
        assert!(Mapped::new(MapFlags::PRIVATE).mapping().file().is_none());
        assert!(Mapping::own(PAGES * PAGE).file().is_none());
    }
}
