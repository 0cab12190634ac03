//! What lies behind another process's memory: nothing of its own, or a file.
//!
//! The page map tells what a process has touched. Of anonymous memory the rest is
//! zero. Of a file's it is whatever the file holds: RAM in a named file
//! (`memory-backend-file`, `-mem-path`) has what its last user left, private or
//! shared, and memory of a memfd that was swapped out looks untouched. So of a file
//! only what the file system calls a hole is zero.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{SeekFrom, fstatfs, major, minor, seek};
use rustix::io::Errno;

/// Of `statfs`: file systems of huge pages, which don't tell holes from data.
const HUGETLBFS: i64 = 0x9584_58f6;
/// The one whose files lie in memory; those of memfds are its, too.
const TMPFS: i64 = 0x0102_1994;
/// Those whose holes are holes, also where pages were written by memory and are not
/// on disk yet: tmpfs (and memfd), ext4, XFS, btrfs. Others, such as NFS, have called
/// data a hole.
const TRUSTED: [i64; 4] = [TMPFS, 0xef53, 0x5846_5342, 0x9123_683e];
/// What `stat` counts in.
const STAT_BLOCK_BYTES: u64 = 512;

/// A line of `maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) addresses: Range<u64>,
    pub(crate) writable: bool,
    executable: bool,
    shared: bool,
    offset: u64,
    file: Option<FileId>,
    /// What the kernel calls it.
    path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl Area {
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let addresses = hex(start)?..hex(end)?;
        let rights = words.next()?;
        let offset = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = |text| u32::from_str_radix(text, 16).ok();
        let (major, minor) = (device(major)?, device(minor)?);
        let inode = words.next()?.parse().ok()?;
        let path = words.collect::<Vec<_>>().join(" ").trim_start().to_owned();
        let file = (inode != 0).then_some(FileId { major, minor, inode });
        let (writable, shared) = (rights.starts_with("rw"), rights.ends_with('s'));
        let executable = rights.as_bytes().get(2) == Some(&b'x');
        Some(Self { addresses, writable, executable, shared, offset, file, path })
    }

    /// Whether it is as large, and guest RAM could be it: writable, not executable as
    /// code that an emulator makes, and neither a heap nor a stack.
    pub(crate) fn may_be_ram_of(&self, bytes: u64) -> bool {
        self.addresses.end - self.addresses.start == bytes
            && self.writable
            && !self.executable
            && !self.path.starts_with('[')
    }

    /// Where its file has data, as addresses, `touched` being where the process has
    /// memory. None if that can't be known: then it may be anywhere.
    pub(crate) fn file_data(&self, pid: u32, touched: &[Range<u64>]) -> Option<Vec<Range<u64>>> {
        let Some(id) = self.file else { return Some(Vec::new()) };
        let file = open(pid, &self.path, id)?;
        let metadata = file.metadata().ok()?;
        let system = system_of(&file)?;
        if system == HUGETLBFS {
            let allocated = metadata.blocks() * STAT_BLOCK_BYTES;
            return self.is_all_of_it(allocated, touched).then(Vec::new);
        }
        if TRUSTED.contains(&system) { self.data_of(&file) } else { None }
    }

    /// The holes of its file, as addresses, if that lies in memory.
    pub(crate) fn holes_in_memory(&self, pid: u32) -> Vec<Range<u64>> {
        let file = self.file.and_then(|id| open(pid, &self.path, id));
        let file = file.filter(|file| system_of(file) == Some(TMPFS));
        let Some(data) = file.and_then(|file| self.data_of(&file)) else { return Vec::new() };
        let starts = std::iter::once(self.addresses.start).chain(data.iter().map(|one| one.end));
        let ends = data.iter().map(|one| one.start).chain(std::iter::once(self.addresses.end));
        starts
            .zip(ends)
            .map(|(start, end)| start..end)
            .filter(|hole| hole.start < hole.end)
            .collect()
    }

    /// Whether a file that has so much allocated has it where the process touched it,
    /// and nothing else.
    fn is_all_of_it(&self, allocated: u64, touched: &[Range<u64>]) -> bool {
        let Range { start, end } = self.addresses;
        let inside = touched.iter().map(|range| range.start.max(start)..range.end.min(end));
        let touched: u64 = inside.map(|range| range.end.saturating_sub(range.start)).sum();
        allocated == 0 || (self.shared && allocated == touched)
    }

    fn data_of(&self, file: &File) -> Option<Vec<Range<u64>>> {
        let end = self.offset + (self.addresses.end - self.addresses.start);
        let (mut at, mut data) = (self.offset, Vec::new());
        while at < end {
            let start = match seek(file, SeekFrom::Data(at)) {
                Ok(start) => start,
                // Only a hole to its end.
                Err(Errno::NXIO) => break,
                Err(_) => return None,
            };
            let stop = seek(file, SeekFrom::Hole(start)).ok()?;
            if start >= end {
                break;
            }
            // Somebody changes it: what it holds can't be said.
            if stop <= start {
                return None;
            }
            let address = |offset: u64| self.addresses.start + (offset - self.offset);
            data.push(address(start)..address(stop.min(end)));
            at = stop;
        }
        Some(data)
    }
}

/// Of which kind a file's system is.
fn system_of(file: &File) -> Option<i64> {
    let system = fstatfs(file).ok()?;
    // Its type differs by the processor.
    #[allow(clippy::unnecessary_cast, clippy::cast_lossless, trivial_numeric_casts)]
    Some(system.f_type as i64)
}

/// All areas of a process.
pub(crate) fn areas(pid: u32) -> io::Result<Vec<Area>> {
    // Paths are whatever somebody has named a file.
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    Ok(String::from_utf8_lossy(&maps).lines().filter_map(Area::parse).collect())
}

/// Opens a file that a process has open: QEMU keeps those of its RAM. A description
/// of our own, so that the process's own place in it stays.
fn open(pid: u32, path: &str, id: FileId) -> Option<File> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()? {
        let fd = entry.ok()?.path();
        // Others may be on storage that hangs when it is asked.
        if fs::read_link(&fd).is_ok_and(|target| target.to_string_lossy() != path) {
            continue;
        }
        let Ok(metadata) = fs::metadata(&fd) else { continue };
        let device = metadata.dev();
        let found = FileId { major: major(device), minor: minor(device), inode: metadata.ino() };
        if found == id && metadata.is_file() {
            return File::open(fd).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_understood() {
        let line = "7f00-7f10 rw-p 00000000 00:00 0   [heap]";
        let area = Area::parse(line).unwrap();
        assert_eq!(area.addresses, 0x7f00..0x7f10);
        assert!(area.writable && !area.shared && area.file.is_none());
        let line = "7f00-7f10 r--s 00002000 fe:0a 77   /dev/shm/a b (deleted)";
        let area = Area::parse(line).unwrap();
        assert!(!area.writable && area.shared);
        assert_eq!((area.offset, area.file.unwrap().inode), (0x2000, 77));
        assert_eq!((area.file.unwrap().major, area.file.unwrap().minor), (0xfe, 0x0a));
        assert_eq!(area.path, "/dev/shm/a b (deleted)");
        assert_eq!(Area::parse("nonsense"), None);
        assert_eq!(Area::parse("7f00-7f10 rw-p 0 0"), None);
    }

    #[test]
    fn ram_is_as_large_as_its_block_and_no_code() {
        let is = |line: &str| Area::parse(line).unwrap().may_be_ram_of(0x2000);
        for ram in ["1000-3000 rw-p 0 00:00 0", "1000-3000 rw-s 0 00:01 7 /memfd:ram (deleted)"] {
            assert!(is(ram), "{ram}");
        }
        let others = [
            "1000-4000 rw-p 0 00:00 0",
            "1000-3000 rwxp 0 00:00 0",
            "1000-3000 r--p 0 00:00 0",
            "1000-3000 rw-p 0 00:00 0 [heap]",
        ];
        for other in others {
            assert!(!is(other), "{other}");
        }
    }

    #[test]
    fn what_is_allocated_elsewhere_in_a_file_may_be_anywhere() {
        let area = Area::parse("1000-9000 rw-s 0 00:01 7").unwrap();
        let touched = [0x0..0x2000, 0x8000..0xa000];
        for (allocated, is_all) in [(0, true), (0x2000, true), (0x3000, false)] {
            assert_eq!(area.is_all_of_it(allocated, &touched), is_all, "{allocated:x}");
        }
        // What a private one has touched is not the file's.
        let private = Area::parse("1000-9000 rw-p 0 00:01 7").unwrap();
        assert!(private.is_all_of_it(0, &touched) && !private.is_all_of_it(0x2000, &touched));
    }
}
