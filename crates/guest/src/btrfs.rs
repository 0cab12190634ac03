//! Where btrfs has its addresses on its device.
//!
//! FIEMAP reports addresses in a space of btrfs's own, which consists of chunks. Only a file system
//! on one device is read, and only chunks of which it has one copy: of others, btrfs decides for
//! each read which copy to take.

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use cachemap::SECTOR_BYTES;

use crate::mapper::Linear;
use crate::mounts::Number;

/// `BTRFS_IOC_FS_INFO`, `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)`.
const FS_INFO: libc::Ioctl = 0x8400_941f;
const INFO_BYTES: usize = 1024;
/// `BTRFS_IOC_TREE_SEARCH`, `_IOWR(0x94, 17, struct btrfs_ioctl_search_args)`.
const TREE_SEARCH: libc::Ioctl = 0xd000_9411;
const SEARCH_BYTES: usize = 4096;
/// `BTRFS_CHUNK_TREE_OBJECTID`, `BTRFS_FIRST_CHUNK_TREE_OBJECTID`, `BTRFS_CHUNK_ITEM_KEY`.
const CHUNK_TREE: u64 = 3;
const CHUNKS: u64 = 256;
const CHUNK: u32 = 228;
/// `BTRFS_BLOCK_GROUP_DATA`, and all kinds of RAID.
const DATA: u64 = 1;
const COPIES: u64 = 0x7f8;
/// Where the count is in a search, and its results start.
const COUNT: usize = 64;
const RESULTS: usize = 104;
/// The header of each result: transid, objectid, offset, type, length.
const HEADER: usize = 32;

type Search = [u8; SEARCH_BYTES];

/// The data chunks of the file system with this directory, by their addresses. None if it is not
/// btrfs, or not on one device.
pub(crate) fn table(root: BorrowedFd<'_>, sysfs: &Path) -> Option<Vec<Linear>> {
    let on = only_device(&info(root).ok()?, sysfs)?;
    let (mut parts, mut from) = (Vec::new(), Some(0));
    while let Some(first) = from {
        from = add(&search(root, first).ok()?, on, &mut parts);
    }
    Some(parts)
}

#[expect(unsafe_code, reason = "rustix has no requests of btrfs")]
fn info(root: BorrowedFd<'_>) -> io::Result<[u8; INFO_BYTES]> {
    let mut info = [0; INFO_BYTES];
    // SAFETY: the kernel writes as many bytes as there are.
    if unsafe { libc::ioctl(root.as_raw_fd(), FS_INFO, info.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(info)
}

/// Searches for chunks with this address or a higher one.
#[expect(unsafe_code, reason = "rustix has no requests of btrfs")]
fn search(root: BorrowedFd<'_>, first: u64) -> io::Result<Search> {
    let mut search = question(first);
    // SAFETY: the kernel reads and writes as many bytes as there are.
    if unsafe { libc::ioctl(root.as_raw_fd(), TREE_SEARCH, search.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(search)
}

fn question(first: u64) -> Search {
    // Tree, objects, offsets, transactions.
    let words = [CHUNK_TREE, CHUNKS, CHUNKS, first, u64::MAX, 0, u64::MAX].map(u64::to_ne_bytes);
    // Types, and the most results: as many as fit.
    let short = [CHUNK, CHUNK, u32::MAX].map(u32::to_ne_bytes);
    let mut search = [0; SEARCH_BYTES];
    let bytes = words.as_flattened().iter().chain(short.as_flattened());
    search.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    search
}

/// The file system's device, if it is the only one.
fn only_device(info: &[u8; INFO_BYTES], sysfs: &Path) -> Option<Number> {
    let devices = u64::from_ne_bytes(*info.get(8..)?.first_chunk()?);
    let mut id = String::new();
    for (nth, byte) in info.get(16..32)?.iter().enumerate() {
        let dash = if matches!(nth, 4 | 6 | 8 | 10) { "-" } else { "" };
        write!(id, "{dash}{byte:02x}").ok()?;
    }
    let entries = fs::read_dir(sysfs.join("fs/btrfs").join(id).join("devices")).ok()?;
    let [device] = &entries.flatten().collect::<Vec<_>>()[..] else { return None };
    let number = fs::read_to_string(device.path().join("dev")).ok()?;
    let (major, minor) = number.trim().split_once(':')?;
    let number = Number { major: major.parse().ok()?, minor: minor.parse().ok()? };
    (devices == 1).then_some(number)
}

/// Adds the chunks that a search has found. Returns where the next search starts; none if all were
/// found.
fn add(found: &Search, on: Number, parts: &mut Vec<Linear>) -> Option<u64> {
    let mut rest = found.get(RESULTS..)?;
    let mut next = None;
    for _ in 0..u32::from_ne_bytes(*found.get(COUNT..)?.first_chunk()?) {
        let (header, behind) = rest.split_at_checked(HEADER)?;
        let address = u64::from_ne_bytes(*header.get(16..)?.first_chunk()?);
        let bytes = u32::from_ne_bytes(*header.get(28..)?.first_chunk()?);
        let (item, behind) = behind.split_at_checked(usize::try_from(bytes).ok()?)?;
        parts.extend(chunk(item, address, on));
        next = address.checked_add(1);
        rest = behind;
    }
    next
}

/// A chunk of data of which there is one copy.
fn chunk(item: &[u8], address: u64, on: Number) -> Option<Linear> {
    let word = |at: usize| Some(u64::from_le_bytes(*item.get(at..)?.first_chunk()?));
    let stripes = u16::from_le_bytes(*item.get(44..)?.first_chunk()?);
    let kind = word(24)?;
    let is_plain = kind & DATA != 0 && kind & COPIES == 0 && stripes == 1;
    let (sectors, place) = (word(0)? / SECTOR_BYTES, word(56)? / SECTOR_BYTES);
    is_plain.then_some(Linear { start: address / SECTOR_BYTES, sectors, on, first_sector: place })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: Number = Number { major: 254, minor: 9 };

    /// A chunk as on disk: its address, length, kind, and where its copies are.
    fn item(address: u64, length: u64, kind: u64, copies: &[u64]) -> (u64, Vec<u8>) {
        let mut item = [length, 2, 65536, kind].map(u64::to_le_bytes).concat();
        item.extend([65536_u32, 65536, 4096].map(u32::to_le_bytes).as_flattened());
        item.extend(u16::try_from(copies.len()).unwrap().to_le_bytes());
        item.extend(1_u16.to_le_bytes());
        for copy in copies {
            item.extend([1, *copy].map(u64::to_le_bytes).as_flattened());
            item.extend([7_u8; 16]);
        }
        (address, item)
    }

    /// What the kernel answers.
    fn found(items: &[(u64, Vec<u8>)]) -> Search {
        let mut found = question(0)[..RESULTS].to_vec();
        let count = u32::try_from(items.len()).unwrap();
        found[COUNT..COUNT + 4].copy_from_slice(&count.to_ne_bytes());
        for (address, item) in items {
            found.extend([9, CHUNKS, *address].map(u64::to_ne_bytes).as_flattened());
            let bytes = u32::try_from(item.len()).unwrap();
            found.extend([CHUNK, bytes].map(u32::to_ne_bytes).as_flattened());
            found.extend(item);
        }
        found.resize(SEARCH_BYTES, 0);
        found.try_into().unwrap()
    }

    #[test]
    fn chunks_of_data_with_one_copy_are_parts_of_the_device() {
        let mib = 1_u64 << 20;
        let items = [
            item(13 * mib, 8 * mib, DATA, &[5 * mib]),
            // Metadata, twice on the device; data, twice; data and metadata together.
            item(21 * mib, 8 * mib, 4 | 1 << 5, &[13 * mib, 21 * mib]),
            item(29 * mib, 8 * mib, DATA | 1 << 5, &[29 * mib, 37 * mib]),
            item(37 * mib, 8 * mib, DATA | 4, &[45 * mib]),
        ];
        let mut parts = Vec::new();
        assert_eq!(add(&found(&items), ON, &mut parts), Some(37 * mib + 1));
        let part = |start, place| {
            let [start, sectors, first_sector] = [start, 8, place].map(|mib: u64| mib * 2048);
            Linear { start, sectors, on: ON, first_sector }
        };
        assert_eq!(parts, [part(13, 5), part(37, 45)]);
        assert_eq!(add(&found(&[]), ON, &mut parts), None);
        let mut cut = found(&items);
        cut[RESULTS + 28..RESULTS + 32].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(add(&cut, ON, &mut parts), None);
        assert_eq!(parts.len(), 2);
    }

    #[test]
    fn a_file_system_on_one_device_is_on_that() {
        let sysfs = tempfile::tempdir().unwrap();
        let mut info = [0; INFO_BYTES];
        info[8..16].copy_from_slice(&1_u64.to_ne_bytes());
        let id: Vec<u8> = (0xf0..=0xff).collect();
        info[16..32].copy_from_slice(&id);
        assert_eq!(only_device(&info, sysfs.path()), None);
        let devices = sysfs.path().join("fs/btrfs/f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff/devices");
        fs::create_dir_all(devices.join("vda9")).unwrap();
        fs::write(devices.join("vda9/dev"), "254:9\n").unwrap();
        assert_eq!(only_device(&info, sysfs.path()), Some(ON));
        info[8] = 2;
        assert_eq!(only_device(&info, sysfs.path()), None, "one is missing");
        info[8] = 1;
        fs::create_dir(devices.join("vdb")).unwrap();
        assert_eq!(only_device(&info, sysfs.path()), None);
    }

    #[test]
    fn a_directory_of_another_file_system_has_no_chunks() {
        let dir = fs::File::open("/proc").unwrap();
        let root = std::os::fd::AsFd::as_fd(&dir);
        assert_eq!(table(root, Path::new("/sys")), None);
    }
}
