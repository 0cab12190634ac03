//! Reads the kernel's information about another process's memory in `/proc`.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::RamError;
use crate::backing::areas;

/// The kernel's page size, the unit of the pagemap.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Entries read at a time: 256 MiB of RAM.
const ENTRIES: usize = 65_536;
/// Entries read at a time for small requests.
const FEW_ENTRIES: usize = 256;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// The parts of RAM that may be non-zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataRanges {
    /// Everything outside these byte ranges is zero: it has no memory behind it, and
    /// either no file or a hole of one.
    Known(Vec<Range<u64>>),
    /// The kernel doesn't tell: any of it may be non-zero.
    Unknown,
}

/// Whether all of `range` is mapped for writing in `pid`.
pub(crate) fn is_writable(pid: u32, range: Range<u64>) -> Result<bool, RamError> {
    let mut reached = range.start;
    for area in areas(pid).map_err(|error| lost(pid, error))? {
        if area.writable && area.addresses.contains(&reached) {
            reached = area.addresses.end;
        }
    }
    Ok(reached >= range.end)
}

/// The start of the only area of `bytes` bytes that `pid` can write, can't execute, and
/// excludes from children. None if there is none, or there are several.
///
/// Size alone proves little: if RAM consists of two areas, as when a part of it is bound
/// to another node, an unrelated area of that size would be taken for it. QEMU excludes
/// its RAM from children (`MADV_DONTFORK`), but not its other memory.
pub(crate) fn only_area_of(pid: u32, bytes: u64) -> Result<Option<u64>, RamError> {
    let areas = areas(pid).map_err(|error| lost(pid, error))?;
    let mut fitting = areas.iter().filter(|area| area.may_be_ram_of(bytes));
    let (Some(area), None) = (fitting.next(), fitting.next()) else { return Ok(None) };
    let details = fs::read_to_string(format!("/proc/{pid}/smaps"));
    let details = details.map_err(|error| lost(pid, error))?;
    let is_ram = is_uninherited(&details, &area.addresses);
    Ok(is_ram.then_some(area.addresses.start))
}

/// Whether `smaps` has the flag `dc` (don't copy on fork) for the area of exactly this
/// range.
fn is_uninherited(smaps: &str, addresses: &Range<u64>) -> bool {
    let header = format!("{:08x}-{:08x} ", addresses.start, addresses.end);
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&header));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"));
    flags.is_some_and(|flags| flags.split_ascii_whitespace().any(|flag| flag == "dc"))
}

pub(crate) fn lost(pid: u32, source: io::Error) -> RamError {
    match source.kind() {
        io::ErrorKind::NotFound => RamError::Exited { pid },
        io::ErrorKind::PermissionDenied => RamError::Denied { pid },
        _ => RamError::Local { action: "reading", pid, source },
    }
}

/// The parts of `bytes` at `base` that may be non-zero: those that the process has
/// touched, and those for which a file behind them has data.
pub(crate) fn data_ranges(pid: u32, base: u64, bytes: u64) -> Result<DataRanges, RamError> {
    let Some(mut data) = touched(pid, base, bytes)? else { return Ok(DataRanges::Unknown) };
    let of_process = base..base + bytes;
    let touched: Vec<_> = data.iter().map(|range| range.start + base..range.end + base).collect();
    for area in areas(pid).map_err(|error| lost(pid, error))? {
        if area.addresses.end <= of_process.start || area.addresses.start >= of_process.end {
            continue;
        }
        let Some(of_file) = area.file_data(pid, &touched) else { return Ok(DataRanges::Unknown) };
        let inside = of_file
            .into_iter()
            .map(|range| range.start.max(of_process.start)..range.end.min(of_process.end));
        let inside = inside.filter(|range| range.start < range.end);
        data.extend(inside.map(|range| range.start - base..range.end - base));
    }
    data.sort_unstable_by_key(|range| range.start);
    let mut ranges = Vec::with_capacity(data.len());
    data.into_iter().for_each(|range| add(&mut ranges, range));
    Ok(DataRanges::Known(ranges))
}

/// The parts that have private memory or swap behind them; none if the kernel doesn't
/// tell.
fn touched(pid: u32, base: u64, bytes: u64) -> Result<Option<Vec<Range<u64>>>, RamError> {
    let pagemap = match File::open(format!("/proc/{pid}/pagemap")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(lost(pid, error)),
    };
    let first = base / PAGE_BYTES;
    let pages = (base + bytes).div_ceil(PAGE_BYTES) - first;
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut buffer = vec![0_u8; ENTRIES * 8];
    let mut page = 0;
    while page < pages {
        let count = usize::try_from(pages - page).unwrap_or(ENTRIES).min(ENTRIES);
        let entries = &mut buffer[..count * 8];
        if pagemap.read_exact_at(entries, (first + page) * 8).is_err() {
            return Ok(None);
        }
        for entry in entries.as_chunks::<8>().0 {
            if u64::from_ne_bytes(*entry) & (PRESENT | SWAPPED) != 0 {
                add(&mut ranges, page_range(base, bytes, page));
            }
            page += 1;
        }
    }
    Ok(Some(ranges))
}

/// Which pages from `address` on are in memory now, as far as the kernel tells.
pub(crate) fn present(pid: u32, address: u64, present: &mut [bool]) -> Result<(), RamError> {
    // This also covers addresses that are not page-aligned.
    present.fill(false);
    let pagemap = match File::open(format!("/proc/{pid}/pagemap")) {
        Ok(file) if address.is_multiple_of(PAGE_BYTES) => file,
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
        Err(error) => return Err(lost(pid, error)),
    };
    let mut entries = [0; FEW_ENTRIES * 8];
    for (nth, present) in (0..).zip(present.chunks_mut(FEW_ENTRIES)) {
        let entries = &mut entries[..present.len() * 8];
        let first = address / PAGE_BYTES + nth * FEW_ENTRIES as u64;
        if pagemap.read_exact_at(entries, first * 8).is_err() {
            return Ok(());
        }
        for (present, entry) in present.iter_mut().zip(entries.as_chunks::<8>().0) {
            *present = u64::from_ne_bytes(*entry) & PRESENT != 0;
        }
    }
    Ok(())
}

/// The part of the RAM on its page number `page`.
fn page_range(base: u64, bytes: u64, page: u64) -> Range<u64> {
    let start = (base / PAGE_BYTES + page) * PAGE_BYTES;
    start.saturating_sub(base)..(start + PAGE_BYTES - base).min(bytes)
}

fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::mm::{
        Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
    };
    use rustix::process::PidfdFlags;

    use super::*;
    use crate::Mapping;

    #[test]
    #[expect(unsafe_code, reason = "memory is mapped by hand")]
    fn only_memory_excluded_from_children_is_taken_for_ram() {
        let smaps = "7f00-7f10 rw-p 00000000 00:00 0\nSize: 4 kB\nVmFlags: rd wr mr mw me ac\n\
                     00010000-00020000 rw-p 00000000 00:00 0\nVmFlags: rd wr dc hg\n";
        assert!(is_uninherited(smaps, &(0x1_0000..0x2_0000)));
        assert!(!is_uninherited(smaps, &(0x7f00..0x7f10)));
        assert!(!is_uninherited(smaps, &(0x1_0000..0x1_8000)));
        let us = std::process::id();
        // Like QEMU's RAM, between inaccessible pages: otherwise Linux would merge it with
        // an adjacent mapping of another test.
        let (page, ram_bytes) = (1_usize << 12, (24_usize << 20) + (12 << 12));
        let (none, private) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: no address is requested, and the mapping is this test's own.
        let found = unsafe {
            let around =
                mmap_anonymous(std::ptr::null_mut(), ram_bytes + 2 * page, none, private).unwrap();
            let ram = around.byte_add(page);
            mprotect(ram, ram_bytes, MprotectFlags::READ | MprotectFlags::WRITE).unwrap();
            assert_eq!(only_area_of(us, ram_bytes as u64).unwrap(), None);
            madvise(ram, ram_bytes, Advice::LinuxDontFork).unwrap();
            let found = only_area_of(us, ram_bytes as u64).unwrap();
            munmap(around, ram_bytes + 2 * page).unwrap();
            (found, ram)
        };
        assert_eq!(found.0, Some(found.1 as u64));
        // Equally large, but inherited by children.
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let file = tempfile::tempfile().unwrap();
        let bytes: u64 = (24 << 20) + (20 << 12);
        file.set_len(bytes).unwrap();
        let len = usize::try_from(bytes).unwrap();
        // SAFETY: no address is requested, and nothing is written to it.
        let other = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, &file, 0) };
        assert_eq!(only_area_of(us, bytes).unwrap(), None);
        // SAFETY: this is the range that was mapped.
        unsafe { munmap(other.unwrap(), len) }.unwrap();
    }

    #[test]
    fn untouched_memory_is_known_and_stays_untouched() {
        const MIB: u64 = 1 << 20;
        let mapping = Mapping::own(64 * MIB);
        let known = |mapping: &Mapping| match mapping.data_ranges().unwrap() {
            DataRanges::Known(ranges) => ranges,
            DataRanges::Unknown => panic!("own memory is known"),
        };
        let bytes_of = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
        assert_eq!(known(&mapping), []);
        mapping.fill(32 * MIB, 2 * 4096, 3).unwrap();
        mapping.read(9, &mut [0; 99]).unwrap();
        let touched = known(&mapping);
        assert!(touched.iter().any(|r| r.start <= 32 * MIB && r.end >= 32 * MIB + 8192));
        assert!(bytes_of(&touched) < 8 * MIB, "not more than a huge page at each end");
    }

    #[test]
    fn presence_is_known_page_by_page() {
        const PAGES: u64 = 1000;
        let mapping = Mapping::own(PAGES * PAGE_BYTES);
        let mut known = [true; 1000];
        mapping.present(0, &mut known).unwrap();
        assert_eq!(known, [false; 1000]);
        // Without huge pages, which are larger than the whole mapping.
        mapping.write(700 * PAGE_BYTES, &[1]).unwrap();
        mapping.write(999 * PAGE_BYTES, &[0]).unwrap();
        mapping.present(0, &mut known).unwrap();
        let all = (0..1000).filter(|page| known[*page]).collect::<Vec<_>>();
        assert_eq!(all, [700, 999]);
        let mut few = [false; 3];
        mapping.present(699 * PAGE_BYTES, &mut few).unwrap();
        assert_eq!(few, [false, true, false]);
        // Unaligned ranges are not examined.
        mapping.present(1, &mut few).unwrap();
        assert_eq!(few, [false; 3]);
        let outside = mapping.present(998 * PAGE_BYTES, &mut few);
        assert!(matches!(outside, Err(RamError::OutOfRange { .. })));
    }

    #[test]
    fn file_data_counts_where_the_process_touched_nothing() {
        const PAGES: u64 = 64;
        let kinds = [MapFlags::SHARED, MapFlags::PRIVATE];
        for (flags, on_disk) in kinds.into_iter().flat_map(|one| [(one, false), (one, true)]) {
            let file = if on_disk {
                tempfile::tempfile().unwrap()
            } else {
                rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
            };
            file.set_len(PAGES * PAGE_BYTES).unwrap();
            file.write_all_at(&[0xff; 4096], 7 * PAGE_BYTES).unwrap();
            file.write_all_at(&[0xff; 2 * 4096], 40 * PAGE_BYTES).unwrap();
            if on_disk {
                // Only after this the file's blocks are known.
                file.sync_all().unwrap();
            }
            let area = MappedFile::new(&file, PAGES * PAGE_BYTES, flags);
            let mapping = area.mapping();
            let DataRanges::Known(ranges) = mapping.data_ranges().unwrap() else { panic!() };
            let holds = |page: u64| ranges.iter().any(|range| range.contains(&(page * PAGE_BYTES)));
            // Other pages may be mapped: the kernel maps neighbours of a page that is
            // read.
            for (page, has_data) in [(7, true), (40, true), (41, true), (30, false), (63, false)] {
                assert_eq!(holds(page), has_data, "{page} {flags:?}, on disk: {on_disk}");
            }
            mapping.write(20 * PAGE_BYTES, &[1]).unwrap();
            let DataRanges::Known(ranges) = mapping.data_ranges().unwrap() else { panic!() };
            assert!(ranges.iter().any(|range| range.contains(&(20 * PAGE_BYTES))), "{flags:?}");
            // Once it is closed, its content is unknown.
            drop(file);
            assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Unknown);
        }
    }

    #[test]
    fn a_missing_process_is_gone() {
        assert!(matches!(is_writable(u32::MAX, 0..1), Err(RamError::Exited { .. })));
    }

    /// A file mapped into this process.
    struct MappedFile {
        address: usize,
        bytes: u64,
    }

    #[expect(unsafe_code, reason = "a mapped file is what is looked at")]
    impl MappedFile {
        fn new(file: &File, bytes: u64, flags: MapFlags) -> Self {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let len = usize::try_from(bytes).unwrap();
            // SAFETY: no address is requested, so no existing mapping changes.
            let base = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, file, 0) };
            Self { address: base.unwrap().expose_provenance(), bytes }
        }

        fn mapping(&self) -> Mapping {
            let me = rustix::process::getpid();
            let pidfd = rustix::process::pidfd_open(me, PidfdFlags::empty()).unwrap();
            let (base, bytes) = (self.address as u64, self.bytes);
            Mapping::of_process(pidfd.as_fd(), std::process::id(), base, bytes).unwrap()
        }
    }

    #[expect(unsafe_code, reason = "unmaps what was mapped")]
    impl Drop for MappedFile {
        fn drop(&mut self) {
            let base = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: the range is the one that was mapped, and no reference into it was
            // ever made.
            unsafe { munmap(base, usize::try_from(self.bytes).unwrap()) }.unwrap();
        }
    }
}
