//! A range of another process's memory.

#![expect(unsafe_code, reason = "another process's memory has addresses, and no references")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::RamError;
use crate::pagemap::{self, DataRanges};

/// Bytes written at a time when RAM is filled.
const FILL_BYTES: usize = 64 << 10;
static ZEROS: [u8; FILL_BYTES] = [0; FILL_BYTES];
/// Most pieces of either side in one system call: the kernel's own limit.
const VECTORS_MAX: usize = 1024;

/// RAM of a QEMU process, as a range of its addresses.
#[derive(Debug)]
pub struct Mapping {
    pid: u32,
    /// Readable once the process has ended and its number may be reused. None for
    /// memory of this process.
    pidfd: Option<OwnedFd>,
    base: u64,
    bytes: u64,
    /// Memory of this process, for [`Mapping::own`].
    _own: Option<Own>,
}

/// New memory of this process, touched only by the kernel, by address.
#[derive(Debug)]
struct Own {
    address: usize,
    len: usize,
}

impl Own {
    fn new(len: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: no address is requested, so no existing mapping changes.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }?;
        // As QEMU does with its RAM.
        // SAFETY: this changes what a child inherits, and nothing in this process.
        unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontFork) }?;
        Ok(Self { address: base.expose_provenance(), len })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let base = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the range is the one that was mapped, and no reference into it
        // was ever made.
        let unmapped = unsafe { rustix::mm::munmap(base, self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped");
    }
}

impl Mapping {
    /// The `bytes` bytes at `base` in the memory of the process that `pidfd` refers to
    /// and whose number is `pid`.
    ///
    /// The kernel copies by process number. A write is made only while the process
    /// lives, and a read counts only if it still lives afterwards: a later process
    /// with the same number is never mistaken for it.
    ///
    /// # Errors
    /// If there is no such memory, or it can't be accessed.
    pub fn of_process(
        pidfd: BorrowedFd<'_>,
        pid: u32,
        base: u64,
        bytes: u64,
    ) -> Result<Self, RamError> {
        let watched = pidfd.try_clone_to_owned();
        let watched =
            watched.map_err(|source| RamError::Local { action: "watching", pid, source })?;
        let mapping = Self { pid, pidfd: Some(watched), base, bytes, _own: None };
        let end = base.checked_add(bytes).filter(|end| *end < 1 << 63 && bytes > 0);
        let not_there = RamError::NotThere { pid, base, bytes };
        let Some(end) = end else { return Err(not_there) };
        if !pagemap::is_writable(pid, base..end)? {
            return Err(not_there);
        }
        // Only an attempt shows whether access is permitted. Reading a hole of
        // anonymous memory allocates nothing.
        mapping.read(0, &mut [0])?;
        Ok(mapping)
    }

    /// The process's only memory of `bytes` bytes that is writable and not executable,
    /// for a QEMU that can't be queried for its RAM's address.
    ///
    /// None if there is no such memory, or more than one: then it is unknown which is
    /// the RAM.
    ///
    /// # Errors
    /// As [`Mapping::of_process`].
    pub fn only_of_size(
        pidfd: BorrowedFd<'_>,
        pid: u32,
        bytes: u64,
    ) -> Result<Option<Self>, RamError> {
        match pagemap::only_area_of(pid, bytes)? {
            Some(base) => Self::of_process(pidfd, pid, base, bytes).map(Some),
            None => Ok(None),
        }
    }

    /// Memory of this process, accessed in the same way as a QEMU's, for tests and
    /// benchmarks of dependent crates.
    ///
    /// # Panics
    /// If there is not enough memory.
    #[must_use]
    pub fn own(bytes: u64) -> Self {
        let len = usize::try_from(bytes).expect("memory that can be addressed");
        let own = Own::new(len).expect("address space");
        let base = own.address as u64;
        Self { pid: std::process::id(), pidfd: None, base, bytes, _own: Some(own) }
    }

    /// The process whose memory it is.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Checks that the process still lives, so the number is still its own.
    ///
    /// # Errors
    /// [`RamError::Exited`] if it has ended.
    pub fn still_there(&self) -> Result<(), RamError> {
        let Some(pidfd) = &self.pidfd else { return Ok(()) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)) {
                Ok(0) => return Ok(()),
                Ok(_) => return Err(RamError::Exited { pid: self.pid }),
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let source = errno.into();
                    return Err(RamError::Local { action: "watching", pid: self.pid, source });
                }
            }
        }
    }

    /// Its first address in that process.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// The RAM's size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes `content` at `offset`.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], with nothing written; or the kernel's error.
    pub fn write(&self, offset: u64, content: &[u8]) -> Result<(), RamError> {
        let to = self.remote(offset, content.len())?;
        self.copy(Way::To, &mut [local(content)], &mut [to])
    }

    /// Sets `bytes` bytes at `offset` to `byte`. This allocates memory for holes, even
    /// for zeros.
    ///
    /// # Errors
    /// As [`Mapping::write`].
    pub fn fill(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), RamError> {
        let bytes = usize::try_from(bytes).map_err(|_| self.out_of_range(offset, bytes))?;
        self.remote(offset, bytes)?;
        let other;
        let piece: &[u8] = if byte == 0 {
            &ZEROS
        } else {
            other = [byte; 4096];
            &other
        };
        let call_bytes = piece.len() * VECTORS_MAX;
        let mut vectors = [local(piece); VECTORS_MAX];
        let mut done = 0;
        while done < bytes {
            let now = (bytes - done).min(call_bytes);
            let count = now.div_ceil(piece.len());
            vectors[..count].fill(local(piece));
            vectors[count - 1].iov_len = now - (count - 1) * piece.len();
            let to = self.remote(offset + done as u64, now)?;
            self.copy(Way::To, &mut vectors[..count], &mut [to])?;
            done += now;
        }
        Ok(())
    }

    /// Copies the bytes at `offset` into `into`.
    ///
    /// # Errors
    /// As [`Mapping::write`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let from = self.remote(offset, into.len())?;
        let here = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        self.copy(Way::From, &mut [here], &mut [from])
    }

    /// The parts that may be non-zero, in order: those that QEMU has touched, and the
    /// data of a file behind its RAM. Nothing is read for this, so holes stay holes.
    ///
    /// # Errors
    /// If QEMU has ended.
    pub fn data_ranges(&self) -> Result<DataRanges, RamError> {
        let ranges = pagemap::data_ranges(self.pid, self.base, self.bytes)?;
        self.still_there().map(|()| ranges)
    }

    /// Which pages from `offset` on, one per entry of `present`, are in memory now.
    ///
    /// Reading those allocates nothing. Others may be in swap, or holes, which would
    /// be allocated if they are a file's. If the kernel doesn't tell, no page counts
    /// as present.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], or if QEMU has ended.
    pub fn present(&self, offset: u64, present: &mut [bool]) -> Result<(), RamError> {
        let bytes = present.len() as u64 * pagemap::PAGE_BYTES;
        let len = usize::try_from(bytes).map_err(|_| self.out_of_range(offset, bytes))?;
        self.remote(offset, len)?;
        pagemap::present(self.pid, self.base + offset, present)?;
        self.still_there()
    }

    /// The address of `len` bytes at `offset` in the other process, if inside the RAM.
    pub(crate) fn remote(&self, offset: u64, len: usize) -> Result<libc::iovec, RamError> {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.bytes);
        let address = usize::try_from(self.base.wrapping_add(offset));
        let (true, Ok(address)) = (inside, address) else {
            return Err(self.out_of_range(offset, len as u64));
        };
        let iov_base = std::ptr::without_provenance_mut(address);
        Ok(libc::iovec { iov_base, iov_len: len })
    }

    /// Writes local pieces, one after the other, to remote ones of the same total
    /// length.
    pub(crate) fn scatter(
        &self,
        here: &mut [libc::iovec],
        there: &mut [libc::iovec],
    ) -> Result<(), RamError> {
        self.copy(Way::To, here, there)
    }

    /// Reads remote pieces, one after the other, into `into`.
    pub(crate) fn gather_once(
        &self,
        there: &mut [libc::iovec],
        into: &mut [u8],
    ) -> Result<(), RamError> {
        let here = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        self.copy(Way::From, &mut [here], there)
    }

    fn copy(
        &self,
        way: Way,
        mut here: &mut [libc::iovec],
        mut there: &mut [libc::iovec],
    ) -> Result<(), RamError> {
        loop {
            advance(&mut here, 0);
            advance(&mut there, 0);
            if here.is_empty() || there.is_empty() {
                return Ok(());
            }
            let copied = self.copy_once(way, here, there)?;
            advance(&mut here, copied);
            advance(&mut there, copied);
        }
    }

    fn copy_once(
        &self,
        way: Way,
        here: &[libc::iovec],
        there: &[libc::iovec],
    ) -> Result<usize, RamError> {
        let pid =
            libc::pid_t::try_from(self.pid).map_err(|_| RamError::Exited { pid: self.pid })?;
        let count = |vectors: &[libc::iovec]| vectors.len().min(VECTORS_MAX) as libc::c_ulong;
        let (ours, theirs) = (here.as_ptr(), there.as_ptr());
        if way == Way::To {
            self.still_there()?;
        }
        // SAFETY: `here` lists local memory: slices that the callers hold for the
        // whole call, shared for `Way::To`, which only reads them, and exclusive for
        // `Way::From`. `there` are addresses of another process, which the kernel
        // checks; where that process is this one (`Mapping::own`), they lie inside
        // memory that this struct owns and that nothing else refers to while it does.
        let copied = unsafe {
            match way {
                Way::To => libc::process_vm_writev(pid, ours, count(here), theirs, count(there), 0),
                Way::From => {
                    libc::process_vm_readv(pid, ours, count(here), theirs, count(there), 0)
                }
            }
        };
        let copied = usize::try_from(copied);
        let copied = copied.map_err(|_| self.refused(way, io::Error::last_os_error()))?;
        if way == Way::From {
            self.still_there()?;
        }
        Ok(copied)
    }

    fn refused(&self, way: Way, source: io::Error) -> RamError {
        let pid = self.pid;
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => RamError::Denied { pid },
            Some(libc::ESRCH) => RamError::Exited { pid },
            // A page that can't be allocated raises a signal on access, but an error
            // code in a system call.
            Some(libc::EFAULT | libc::ENOMEM) if way == Way::To => RamError::NoMemory,
            _ => RamError::Local { action: way.verb(), pid, source },
        }
    }

    fn out_of_range(&self, offset: u64, bytes: u64) -> RamError {
        RamError::OutOfRange { offset, bytes, size_bytes: self.bytes }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    To,
    From,
}

impl Way {
    fn verb(self) -> &'static str {
        match self {
            Self::To => "writing",
            Self::From => "reading",
        }
    }
}

/// A local piece, to be copied from.
pub(crate) fn local(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Removes `bytes` from the front, and then empty pieces.
fn advance(vectors: &mut &mut [libc::iovec], mut bytes: usize) {
    while let Some(first) = vectors.first_mut() {
        if bytes < first.iov_len {
            first.iov_base = first.iov_base.wrapping_byte_add(bytes);
            first.iov_len -= bytes;
            return;
        }
        bytes -= first.iov_len;
        let all = std::mem::take(vectors);
        *vectors = &mut all[1..];
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;
    use rustix::process::{Pid, PidfdFlags};

    use super::*;

    #[test]
    fn an_access_outside_the_ram_changes_nothing() {
        let mapping = Mapping::own(8192);
        let outside = [(8192, 1), (8191, 2), (u64::MAX, 1), (u64::MAX - 1, 8), (1 << 63, 4096)];
        for (offset, bytes) in outside {
            let mut buffer = vec![1; usize::try_from(bytes).unwrap()];
            let is_refused = |result: Result<(), RamError>| {
                matches!(result, Err(RamError::OutOfRange { size_bytes: 8192, .. }))
            };
            assert!(is_refused(mapping.write(offset, &buffer)));
            assert!(is_refused(mapping.fill(offset, bytes, 1)));
            assert!(is_refused(mapping.read(offset, &mut buffer)));
        }
        assert!(mapping.fill(1, u64::MAX, 1).is_err());
        assert!(mapping.write(8192, &[]).is_ok());
    }

    #[test]
    fn memory_of_another_process_is_reached_until_it_ends() {
        // `cat` has writable memory; its maps tell where.
        let mut cat = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Its output shows that it is past exec; it then stays in its read.
        let mut input = cat.stdin.take().unwrap();
        std::io::Write::write_all(&mut input, b"x").unwrap();
        std::io::Read::read_exact(cat.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", cat.id())).unwrap();
        let heap = maps.lines().find(|line| line.ends_with("[heap]")).unwrap();
        let (start, end) = heap.split(' ').next().unwrap().split_once('-').unwrap();
        let start = u64::from_str_radix(start, 16).unwrap();
        let bytes = u64::from_str_radix(end, 16).unwrap() - start;
        let of_cat = |base, bytes| {
            let number = Pid::from_child(&cat);
            let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty()).unwrap();
            Mapping::of_process(pidfd.as_fd(), cat.id(), base, bytes)
        };
        let mapping = of_cat(start, bytes).unwrap();
        mapping.write(bytes - 8, b"droveway").unwrap();
        let mut read = [0; 8];
        mapping.read(bytes - 8, &mut read).unwrap();
        assert_eq!(&read, b"droveway");
        for (base, bytes) in [(start, bytes * 1000), (4096, 4096), (u64::MAX - 9, 4096), (start, 0)]
        {
            let refused = of_cat(base, bytes).unwrap_err();
            assert!(matches!(refused, RamError::NotThere { .. }), "{refused}");
        }
        drop(input);
        cat.wait().unwrap();
        assert!(matches!(mapping.write(0, &[1]), Err(RamError::Exited { .. })));
    }

    /// Its number was reused by a process with the same memory at the same address:
    /// this one.
    #[test]
    fn a_later_process_of_the_same_number_is_not_touched() {
        let own = Mapping::own(8192);
        own.write(0, b"mine").unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let number = Pid::from_child(&ended);
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty()).unwrap();
        ended.wait().unwrap();
        let reused =
            Mapping { pid: own.pid, pidfd: Some(pidfd), base: own.base, bytes: 8192, _own: None };
        let has_exited =
            |outcome: Result<(), RamError>| matches!(outcome, Err(RamError::Exited { .. }));
        assert!(has_exited(reused.write(0, b"else")));
        assert!(has_exited(reused.fill(0, 4096, 1)));
        assert!(has_exited(reused.read(0, &mut [0; 4])));
        assert!(has_exited(reused.present(0, &mut [false])));
        assert!(has_exited(reused.data_ranges().map(drop)));
        let mut content = [0; 4];
        own.read(0, &mut content).unwrap();
        assert_eq!(&content, b"mine");
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_vector(
            steps in proptest::collection::vec(
                (0..400_000_u64, 0..300_000_usize, any::<u8>(), any::<bool>()),
                1..20,
            ),
        ) {
            const BYTES: usize = 400_000;
            let mapping = Mapping::own(BYTES as u64);
            let mut model = vec![0; BYTES];
            for (offset, bytes, byte, write) in steps {
                let at = usize::try_from(offset).unwrap();
                let inside = at + bytes <= BYTES;
                let byte = if byte < 100 { 0 } else { byte };
                let done = if write {
                    mapping.write(offset, &vec![byte; bytes]).is_ok()
                } else {
                    mapping.fill(offset, bytes as u64, byte).is_ok()
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
