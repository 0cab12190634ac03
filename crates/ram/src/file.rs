//! A file of memory that is a VM's RAM block.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::FdFlags;

use crate::RamError;

/// Pages of RAM that isn't made of huge ones.
const SMALL_PAGE_BYTES: u64 = 4096;

/// `statfs` types of the file systems whose files are memory.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

/// memfd's flags hold the logarithm of the huge pages' size from this bit on.
const HUGE_SHIFT: u32 = 26;

/// A file of memory that is, or will be, a VM's RAM block.
#[derive(Debug)]
pub struct RamFile {
    fd: OwnedFd,
    bytes: u64,
    page_bytes: u64,
}

impl RamFile {
    /// Makes RAM of `bytes`, all of it a hole, out of huge pages of `huge`
    /// bytes or out of small ones. It can neither shrink nor grow.
    ///
    /// The file is closed when a program is executed, unless
    /// [`RamFile::set_inherited`] says otherwise.
    ///
    /// # Errors
    /// If the size is not a multiple of its pages or the host can't do it.
    /// Whether the pool of huge pages has room shows when it is mapped.
    pub fn create(name: &str, bytes: u64, huge: Option<u64>) -> Result<Self, RamError> {
        let page_bytes = huge.unwrap_or(SMALL_PAGE_BYTES);
        if huge.is_some() && !page_bytes.is_power_of_two() {
            return Err(RamError::NoSuchPages { page_bytes });
        }
        if bytes == 0 || !bytes.is_multiple_of(page_bytes) {
            return Err(RamError::BadSize { bytes, page_bytes });
        }
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge.is_some() {
            let size = MemfdFlags::from_bits_retain(page_bytes.ilog2() << HUGE_SHIFT);
            flags |= MemfdFlags::HUGETLB | size;
        }
        let refused = |source: rustix::io::Errno| RamError::Create {
            name: name.to_owned(),
            bytes,
            source: source.into(),
        };
        let fd = rustix::fs::memfd_create(name, flags).map_err(|errno| match huge {
            Some(page_bytes) => RamError::NoSuchPages { page_bytes },
            None => refused(errno),
        })?;
        rustix::fs::ftruncate(&fd, bytes).map_err(refused)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(refused)?;
        Ok(Self { fd, bytes, page_bytes })
    }

    /// Opens RAM that another process made: `/proc/PID/fd/N` of a QEMU with
    /// `memory-backend-memfd`, or a file in `/dev/shm`.
    ///
    /// # Errors
    /// If the file can't be opened for writing or is not shared memory.
    pub fn open(path: &Path) -> Result<Self, RamError> {
        let refused = |source: rustix::io::Errno| RamError::Open {
            path: path.to_owned(),
            source: source.into(),
        };
        // NONBLOCK: the path comes from outside, and opening a pipe would wait.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(refused)?;
        let stat = rustix::fs::fstat(&fd).map_err(refused)?;
        let filesystem = rustix::fs::fstatfs(&fd).map_err(refused)?;
        let page_bytes = match u64::try_from(filesystem.f_type) {
            Ok(TMPFS) => Some(SMALL_PAGE_BYTES),
            Ok(HUGETLBFS) => u64::try_from(filesystem.f_bsize).ok().filter(|&bytes| bytes > 0),
            _ => None,
        };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let (true, Some(page_bytes)) = (is_file, page_bytes) else {
            return Err(RamError::NotMemory { path: path.to_owned() });
        };
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes == 0 {
            return Err(RamError::BadSize { bytes, page_bytes });
        }
        Ok(Self { fd, bytes, page_bytes })
    }

    /// The RAM's size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The size of the pages it is made of.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Whether it is made of huge pages.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.page_bytes != SMALL_PAGE_BYTES
    }

    /// Bytes that have memory behind them; the rest are holes.
    ///
    /// # Errors
    /// If the kernel doesn't say.
    pub fn allocated_bytes(&self) -> Result<u64, RamError> {
        let stat = rustix::fs::fstat(&self.fd)
            .map_err(|errno| RamError::Local { action: "measuring", source: errno.into() })?;
        // 512 is the unit of st_blocks, whatever the file system's block is.
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Whether programs that are executed from now on get the file, under the
    /// number it has here.
    ///
    /// This goes for every program that any thread executes meanwhile, so it
    /// belongs between `fork` and `exec`, where there is only one.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn set_inherited(&self, inherited: bool) -> io::Result<()> {
        let flags = if inherited { FdFlags::empty() } else { FdFlags::CLOEXEC };
        Ok(rustix::io::fcntl_setfd(&self.fd, flags)?)
    }

    /// The same file under another number.
    ///
    /// # Errors
    /// If there are too many open files.
    pub fn try_clone(&self) -> Result<Self, RamError> {
        let fd = self
            .fd
            .try_clone()
            .map_err(|source| RamError::Local { action: "sharing the file of", source })?;
        Ok(Self { fd, bytes: self.bytes, page_bytes: self.page_bytes })
    }
}

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<RamFile> for OwnedFd {
    fn from(file: RamFile) -> Self {
        file.fd
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn new_ram_is_a_hole_that_keeps_its_size() {
        let file = RamFile::create("ram-test", 1 << 40, None).unwrap();
        assert_eq!(file.bytes(), 1 << 40);
        assert_eq!(file.allocated_bytes().unwrap(), 0);
        assert!(rustix::fs::ftruncate(&file, 4096).is_err());
        assert!(rustix::fs::ftruncate(&file, 1 << 41).is_err());
    }

    #[test]
    fn it_is_inherited_only_when_asked() {
        let file = RamFile::create("ram-test", 4096, None).unwrap();
        let inherited = || !rustix::io::fcntl_getfd(&file).unwrap().contains(FdFlags::CLOEXEC);
        assert!(!inherited());
        file.set_inherited(true).unwrap();
        assert!(inherited());
        file.set_inherited(false).unwrap();
        assert!(!inherited());
    }

    #[test]
    fn sizes_that_pages_do_not_make_are_refused() {
        for (bytes, huge) in [(0, None), (4097, None), (4096, Some(2 << 20)), (0, Some(2 << 20))] {
            let refused = RamFile::create("ram-test", bytes, huge);
            assert!(matches!(refused, Err(RamError::BadSize { .. })), "{bytes} {huge:?}");
        }
        for page_bytes in [0, 3 << 20, 1 << 45] {
            let refused = RamFile::create("ram-test", page_bytes, Some(page_bytes));
            assert!(matches!(refused, Err(RamError::NoSuchPages { .. })), "{page_bytes}");
        }
    }

    #[test]
    fn the_ram_of_another_process_is_opened_by_its_path() {
        let made = RamFile::create("ram-test", 3 * 4096, None).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), made.as_fd().as_raw_fd());
        let opened = RamFile::open(Path::new(&path)).unwrap();
        assert_eq!((opened.bytes(), opened.page_bytes()), (3 * 4096, 4096));
        assert!(!opened.is_huge());
    }

    #[test]
    fn what_is_not_shared_memory_is_refused() {
        let missing = RamFile::open(Path::new("/proc/self/fd/1000000"));
        assert!(matches!(missing, Err(RamError::Open { .. })));
        for path in ["/dev/null", "/proc/self/comm"] {
            let path = PathBuf::from(path);
            let refused = RamFile::open(&path);
            assert!(matches!(refused, Err(RamError::NotMemory { .. })), "{path:?} {refused:?}");
        }
    }
}
