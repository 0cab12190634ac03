//! RAM mapped into this process.

use std::ops::Range;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{RamError, RamFile};

/// Which parts of RAM may hold something else than zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataRanges {
    /// Everything outside these byte ranges is a hole, and so zero.
    Known(Vec<Range<u64>>),
    /// The file system doesn't tell holes from data (hugetlbfs), and some of
    /// the RAM is in use: any of it may hold anything.
    Unknown,
}

/// RAM mapped into this process, shared with whoever else has its file.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    file: RamFile,
}

// SAFETY: the mapping is memory of the whole process, not of a thread, and it
// is only unmapped when the one owner is dropped.
unsafe impl Send for Mapping {}
// SAFETY: all access is by raw pointers to memory that has many writers anyway
// (see the crate's documentation); `Mapping` itself has nothing that changes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the whole of `file`. Its pages stay out of this process's core
    /// dumps and out of its forks.
    ///
    /// # Errors
    /// If the kernel refuses; for huge pages, if their pool has no room, since
    /// mapping reserves them.
    pub fn new(file: &RamFile) -> Result<Self, RamError> {
        let bytes = file.bytes();
        let too_long = |_| RamError::Map { bytes, source: Errno::NOMEM.into() };
        let len = usize::try_from(bytes).map_err(too_long)?;
        let file = file.try_clone()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so the kernel picks free addresses
        // and nothing that is mapped already changes.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &file, 0)
        };
        let base = base.map_err(|errno| match errno {
            Errno::NOMEM if file.is_huge() => {
                RamError::PoolTooSmall { bytes, page_bytes: file.page_bytes() }
            }
            errno => RamError::Map { bytes, source: errno.into() },
        })?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address zero");
        let mapping = Self { base, len, file };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: the range is the mapping just made, and neither advice
            // changes what its memory holds.
            unsafe { rustix::mm::madvise(mapping.base.as_ptr().cast(), len, advice) }
                .map_err(|errno| RamError::Local { action: "advising on", source: errno.into() })?;
        }
        Ok(mapping)
    }

    /// The RAM's size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// The file that is mapped.
    #[must_use]
    pub fn file(&self) -> &RamFile {
        &self.file
    }

    /// Writes `content` at `offset`.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing written.
    pub fn write(&self, offset: u64, content: &[u8]) -> Result<(), RamError> {
        let to = self.address(offset, content.len())?;
        // SAFETY: `address` checked that the whole target is mapped, and
        // `content` can't overlap it because no reference into the mapping
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), to, content.len()) };
        Ok(())
    }

    /// Makes `bytes` bytes at `offset` all `byte`. This puts memory behind
    /// holes, also for zeros.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing written.
    pub fn fill(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), RamError> {
        let len = usize::try_from(bytes).map_err(|_| self.out_of_range(offset, bytes))?;
        let to = self.address(offset, len)?;
        // SAFETY: `address` checked that the whole target is mapped.
        unsafe { std::ptr::write_bytes(to, byte, len) };
        Ok(())
    }

    /// Copies what is at `offset` into `into`. Reading a hole puts memory
    /// behind it: ask [`Mapping::data_ranges`] before reading much.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing read.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let from = self.address(offset, into.len())?;
        // SAFETY: `address` checked that the whole source is mapped, and `into`
        // can't overlap it because no reference into the mapping exists.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Gives the memory behind whole pages back to the host. They read as
    /// zeros afterwards, here and in QEMU.
    ///
    /// Huge pages lose their reservation with that, and whoever writes there
    /// next may find the pool empty and be killed: for RAM that a guest will
    /// use again, fill those with zeros instead.
    ///
    /// # Errors
    /// If the range is outside, not of whole pages, or the kernel refuses.
    pub fn punch(&self, offset: u64, bytes: u64) -> Result<(), RamError> {
        let len = usize::try_from(bytes).map_err(|_| self.out_of_range(offset, bytes))?;
        self.address(offset, len)?;
        let page_bytes = self.file.page_bytes();
        if !offset.is_multiple_of(page_bytes) || !bytes.is_multiple_of(page_bytes) {
            return Err(RamError::NotWholePages { offset, bytes, page_bytes });
        }
        if bytes == 0 {
            return Ok(());
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, hole, offset, bytes)
            .map_err(|errno| RamError::Local { action: "making a hole in", source: errno.into() })
    }

    /// The parts that may hold something else than zeros, in order. Nothing is
    /// read for it, so holes stay holes.
    ///
    /// # Errors
    /// If the kernel doesn't answer.
    pub fn data_ranges(&self) -> Result<DataRanges, RamError> {
        if self.file.allocated_bytes()? == 0 && self.file.is_huge() {
            return Ok(DataRanges::Known(Vec::new()));
        }
        if self.file.is_huge() {
            return Ok(DataRanges::Unknown);
        }
        let mut ranges = Vec::new();
        let mut from = 0;
        while from < self.bytes() {
            let Some(start) = self.seek(SeekFrom::Data(from))? else { break };
            let Some(end) = self.seek(SeekFrom::Hole(start))? else { break };
            if end <= start {
                break;
            }
            ranges.push(start..end.min(self.bytes()));
            from = end;
        }
        Ok(DataRanges::Known(ranges))
    }

    /// `None` when there is no more of what is sought.
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>, RamError> {
        match rustix::fs::seek(&self.file, to) {
            Ok(offset) => Ok(Some(offset)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => {
                Err(RamError::Local { action: "looking for holes in", source: errno.into() })
            }
        }
    }

    /// The address of `offset`, if `len` bytes from there are inside.
    pub(crate) fn address(&self, offset: u64, len: usize) -> Result<*mut u8, RamError> {
        let inside = usize::try_from(offset)
            .ok()
            .filter(|offset| offset.checked_add(len).is_some_and(|end| end <= self.len));
        let Some(offset) = inside else {
            return Err(self.out_of_range(offset, len as u64));
        };
        // SAFETY: `offset` is at most the mapping's length, just checked, so
        // the address is inside it or one past its end.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }

    fn out_of_range(&self, offset: u64, bytes: u64) -> RamError {
        RamError::OutOfRange { offset, bytes, size_bytes: self.bytes() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, nothing else was put
        // there, and no pointer into it outlives the calls that made it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn mapping(bytes: u64) -> Mapping {
        Mapping::new(&RamFile::create("ram-test", bytes, None).unwrap()).unwrap()
    }

    #[test]
    fn what_one_mapping_writes_another_reads_also_after_the_first_is_gone() {
        let file = RamFile::create("ram-test", MIB, None).unwrap();
        let first = Mapping::new(&file).unwrap();
        let second = Mapping::new(&file).unwrap();
        drop(file);
        first.write(5_000, b"herd").unwrap();
        first.fill(MIB - 3, 3, 7).unwrap();
        drop(first);
        let mut read = [0; 4];
        second.read(5_000, &mut read).unwrap();
        assert_eq!(&read, b"herd");
        second.read(MIB - 4, &mut read).unwrap();
        assert_eq!(read, [0, 7, 7, 7]);
    }

    #[test]
    fn an_access_that_is_not_inside_changes_nothing() {
        let mapping = mapping(8192);
        let outside = [(8192, 1), (8191, 2), (u64::MAX, 1), (u64::MAX - 1, 8), (1 << 63, 4096)];
        for (offset, bytes) in outside {
            let mut buffer = vec![1; usize::try_from(bytes).unwrap()];
            let is_refused = |result: Result<(), RamError>| {
                matches!(result, Err(RamError::OutOfRange { size_bytes: 8192, .. }))
            };
            assert!(is_refused(mapping.write(offset, &buffer)));
            assert!(is_refused(mapping.fill(offset, bytes, 1)));
            assert!(is_refused(mapping.read(offset, &mut buffer)));
            assert!(is_refused(mapping.punch(offset, bytes)));
        }
        assert!(mapping.fill(1, u64::MAX, 1).is_err());
        assert!(mapping.write(8192, &[]).is_ok());
        assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![]));
    }

    #[test]
    fn holes_are_known_without_touching_them_and_can_be_made() {
        let mapping = mapping(64 * MIB);
        assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![]));
        mapping.fill(4096, 8192, 3).unwrap();
        mapping.write(64 * MIB - 1, &[1]).unwrap();
        let first = 4096..12288;
        let last = 64 * MIB - 4096..64 * MIB;
        assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![first, last.clone()]));
        assert_eq!(mapping.file().allocated_bytes().unwrap(), 3 * 4096);

        mapping.punch(4096, 8192).unwrap();
        assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![last]));
        let mut page = [9; 4096];
        mapping.read(4096, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        for (offset, bytes) in [(1, 4096), (4096, 1)] {
            let refused = mapping.punch(offset, bytes);
            assert!(matches!(refused, Err(RamError::NotWholePages { .. })));
        }
    }

    #[test]
    fn a_pool_of_huge_pages_that_is_too_small_says_what_to_do() {
        let page_bytes = 2 * MIB;
        let file = RamFile::create("ram-test", 1 << 40, Some(page_bytes)).unwrap();
        let error = Mapping::new(&file).unwrap_err();
        assert!(matches!(error, RamError::PoolTooSmall { .. }), "{error:?}");
        assert!(error.to_string().contains("hugepages-2048kB/nr_hugepages"), "{error}");
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_vector(
            steps in proptest::collection::vec(
                (0..20_000_u64, 0..9_000_usize, any::<u8>(), 0..3_u8),
                1..20,
            ),
        ) {
            const BYTES: usize = 16_384;
            let mapping = mapping(BYTES as u64);
            let mut model = vec![0; BYTES];
            for (offset, bytes, byte, what) in steps {
                let at = usize::try_from(offset).unwrap();
                let inside = at + bytes <= BYTES;
                let done = match what {
                    0 => mapping.write(offset, &vec![byte; bytes]).is_ok(),
                    1 => mapping.fill(offset, bytes as u64, byte).is_ok(),
                    _ => {
                        let (page, pages) = (at / 4096 * 4096, bytes / 4096 * 4096);
                        let inside = page + pages <= BYTES;
                        let punched = mapping.punch(page as u64, pages as u64).is_ok();
                        prop_assert_eq!(punched, inside);
                        if inside {
                            model[page..page + pages].fill(0);
                        }
                        continue;
                    }
                };
                prop_assert_eq!(done, inside);
                if inside {
                    model[at..at + bytes].fill(byte);
                }
            }
            let mut read = vec![1; BYTES];
            mapping.read(0, &mut read).unwrap();
            prop_assert!(read == model);
        }
    }
}
