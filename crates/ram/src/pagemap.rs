//! What the kernel tells of another process's memory in `/proc`.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::RamError;

/// The kernel's page here; the pagemap counts in it.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Entries read at a time: 256 MiB of RAM.
const ENTRIES: usize = 65_536;
/// Entries read at a time where few are asked for.
const FEW_ENTRIES: usize = 256;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// Which parts of RAM may hold something else than zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataRanges {
    /// Everything outside these byte ranges has no memory behind it, and is
    /// zero.
    Known(Vec<Range<u64>>),
    /// The kernel doesn't say: any of it may hold anything.
    Unknown,
}

/// Whether all of `range` is mapped for writing in `pid`.
pub(crate) fn is_writable(pid: u32, range: Range<u64>) -> Result<bool, RamError> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|error| lost(pid, error))?;
    let mut reached = range.start;
    for (start, end) in maps.lines().filter_map(writable) {
        if start <= reached && reached < end {
            reached = end;
        }
    }
    Ok(reached >= range.end)
}

/// The range of a line of `maps`, if it may be written.
fn writable(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    words.next()?.starts_with("rw").then_some((number(start)?, number(end)?))
}

fn lost(pid: u32, source: io::Error) -> RamError {
    match source.kind() {
        io::ErrorKind::NotFound => RamError::Gone { pid },
        io::ErrorKind::PermissionDenied => RamError::Denied { pid },
        _ => RamError::Local { action: "looking at", pid, source },
    }
}

/// The parts of `bytes` at `base` that have memory or swap behind them.
pub(crate) fn data_ranges(pid: u32, base: u64, bytes: u64) -> Result<DataRanges, RamError> {
    let pagemap = match File::open(format!("/proc/{pid}/pagemap")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(DataRanges::Unknown);
        }
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
            return Ok(DataRanges::Unknown);
        }
        for entry in entries.as_chunks::<8>().0 {
            if u64::from_ne_bytes(*entry) & (PRESENT | SWAPPED) != 0 {
                add(&mut ranges, page_range(base, bytes, page));
            }
            page += 1;
        }
    }
    Ok(DataRanges::Known(ranges))
}

/// Which of the pages from `address` on are in memory now, as far as the kernel
/// says it.
pub(crate) fn present(pid: u32, address: u64, present: &mut [bool]) -> Result<(), RamError> {
    // Also where its pages are not ours.
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

/// The part of the RAM that lies on its page number `page`.
fn page_range(base: u64, bytes: u64, page: u64) -> Range<u64> {
    let start = (base / PAGE_BYTES + page) * PAGE_BYTES;
    start.saturating_sub(base)..(start + PAGE_BYTES - base).min(bytes)
}

fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn what_was_never_touched_is_known_and_stays_so() {
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
    fn pages_that_were_never_touched_are_told_from_the_others_one_by_one() {
        const PAGES: u64 = 1000;
        let mapping = Mapping::own(PAGES * PAGE_BYTES);
        let mut known = [true; 1000];
        mapping.present(0, &mut known).unwrap();
        assert_eq!(known, [false; 1000]);
        // Without huge pages, which are larger than all of it.
        mapping.write(700 * PAGE_BYTES, &[1]).unwrap();
        mapping.write(999 * PAGE_BYTES, &[0]).unwrap();
        mapping.present(0, &mut known).unwrap();
        let all = (0..1000).filter(|page| known[*page]).collect::<Vec<_>>();
        assert_eq!(all, [700, 999]);
        let mut few = [false; 3];
        mapping.present(699 * PAGE_BYTES, &mut few).unwrap();
        assert_eq!(few, [false, true, false]);
        // What lies across the kernel's pages is not looked at.
        mapping.present(1, &mut few).unwrap();
        assert_eq!(few, [false; 3]);
        let outside = mapping.present(998 * PAGE_BYTES, &mut few);
        assert!(matches!(outside, Err(RamError::OutOfRange { .. })));
    }

    #[test]
    fn lines_of_maps_are_understood() {
        let line = "7f00-7f10 rw-p 00000000 00:00 0   [heap]";
        assert_eq!(writable(line), Some((0x7f00, 0x7f10)));
        assert_eq!(writable("7f00-7f10 r--p 00000000 00:00 0"), None);
        assert_eq!(writable("nonsense"), None);
        assert!(matches!(is_writable(u32::MAX, 0..1), Err(RamError::Gone { .. })));
    }
}
