//! File systems on disks, filled with files of all sizes, whose content is then in
//! the kernel's page cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::mount::MountFlags;

use crate::PAGE_BYTES;
use crate::memory::Checked;
use crate::record::{self, Record};

/// Size of middle-sized files, which have a quarter of all bytes. One big file has what they and the
/// small files leave.
const MIDDLE_BYTES: u64 = 300_000;
/// The part of all bytes that small files have: in an interpreted guest each takes milliseconds.
const SMALL_PART: u64 = 16;
/// Small files differ in size, so that most end in the middle of a page.
const SMALL_BYTES_MIN: u64 = 500;
const SMALL_BYTES_STEP: u64 = 777;
const SMALL_BYTES_MAX: u64 = 12_000;
/// Small files in one directory.
const SMALL_TOGETHER: u64 = 100;
/// Pages written at once.
const CHUNK_PAGES: usize = 64;
/// The largest file of each place.
const BIG: &str = "big";

/// A page aligned for direct access.
#[repr(align(4096))]
struct Aligned([u8; PAGE_BYTES]);

/// How a file is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Into the page cache, unflushed.
    Cache,
    /// Past the cache, to the disk.
    Direct,
}

/// The files on some file systems.
#[derive(Debug)]
pub struct Files {
    places: Vec<PathBuf>,
    seed: u64,
    next_page: u64,
    records: Vec<Record>,
}

impl Files {
    /// Makes files of `bytes` in total in each of these directories.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn make(places: Vec<PathBuf>, bytes: u64, seed: u64) -> io::Result<Self> {
        let mut files = Self { places, seed, next_page: 0, records: Vec::new() };
        for place in files.places.clone() {
            files.fill(&place, bytes)?;
        }
        Ok(files)
    }

    fn fill(&mut self, place: &Path, bytes: u64) -> io::Result<()> {
        let (middle, small) = (bytes / 4 / MIDDLE_BYTES, bytes / SMALL_PART);
        self.write(&place.join(BIG), bytes - middle * MIDDLE_BYTES - small)?;
        fs::create_dir(place.join("middle"))?;
        for nth in 0..middle {
            self.write(&place.join("middle").join(nth.to_string()), MIDDLE_BYTES)?;
        }
        let (mut left, mut size) = (small, SMALL_BYTES_MIN);
        for nth in 0.. {
            if left < SMALL_BYTES_MAX {
                break;
            }
            let dir = place.join(format!("small/{}", nth / SMALL_TOGETHER));
            fs::create_dir_all(&dir)?;
            self.write(&dir.join(nth.to_string()), size)?;
            left -= size;
            size = (size + SMALL_BYTES_STEP) % SMALL_BYTES_MAX + 1;
        }
        Ok(())
    }

    fn write(&mut self, path: &Path, bytes: u64) -> io::Result<()> {
        let mut file = File::create(path)?;
        let mut record = Record::new(path.to_owned(), self.seed);
        let mut chunk = vec![0; CHUNK_PAGES * PAGE_BYTES];
        let mut left = usize::try_from(bytes).unwrap_or(usize::MAX);
        while left > 0 {
            let now = left.min(chunk.len());
            for page in chunk[..now.next_multiple_of(PAGE_BYTES)].chunks_mut(PAGE_BYTES) {
                self.next_page += 1;
                record::put(self.seed, self.next_page, page);
                record.write(record.bytes() / PAGE_BYTES, self.next_page);
            }
            file.write_all(&chunk[..now])?;
            left -= now;
        }
        record.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        self.records.push(record);
        Ok(())
    }

    /// Reads all files, and returns their number of pages.
    ///
    /// # Errors
    /// If one can't be read.
    pub fn read(&self) -> io::Result<u64> {
        let mut room = vec![0; CHUNK_PAGES * PAGE_BYTES];
        self.places.iter().try_fold(0, |pages, place| Ok(pages + read_below(place, &mut room)?))
    }

    /// Rewrites `pages` pages of each big file from `first` on, and returns their number in total.
    ///
    /// # Errors
    /// If that fails.
    pub fn change(&mut self, first: u64, pages: u64, way: Way) -> io::Result<u64> {
        let mut page = Box::new(Aligned([0; PAGE_BYTES]));
        for record in self.records.iter_mut().filter(|record| record.path().ends_with(BIG)) {
            let mut options = OpenOptions::new();
            if way == Way::Direct {
                options.custom_flags(OFlags::DIRECT.bits().cast_signed());
            }
            let file = options.write(true).open(record.path())?;
            for at in first..first + pages {
                self.next_page += 1;
                record::put(self.seed, self.next_page, &mut page.0);
                file.write_all_at(&page.0, at * PAGE_BYTES as u64)?;
                record.write(usize::try_from(at).unwrap_or(usize::MAX), self.next_page);
            }
        }
        Ok(pages * self.places.len() as u64)
    }

    /// Remounts the file systems read-only, so that the kernel writes nothing to them, not even on
    /// its own. Then reads all files, and returns their number of pages.
    ///
    /// # Errors
    /// If one can't be remounted or read.
    pub fn make_read_only(&mut self) -> io::Result<u64> {
        for place in &self.places {
            rustix::mount::mount_remount(place, MountFlags::RDONLY, c"")?;
        }
        self.read()
    }

    /// Reads all files, and compares them with their records.
    ///
    /// # Errors
    /// If one can't be read.
    pub fn check(&self) -> io::Result<Checked> {
        record::check(&self.records)
    }
}

fn read_below(path: &Path, room: &mut [u8]) -> io::Result<u64> {
    let mut pages = 0;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            pages += read_below(&entry.path(), room)?;
            continue;
        }
        let mut file = File::open(entry.path())?;
        let mut bytes = 0;
        loop {
            match file.read(room)? {
                0 => break,
                read => bytes += read,
            }
        }
        pages += bytes.div_ceil(PAGE_BYTES) as u64;
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_the_pages_that_they_should_and_can_be_changed() {
        let at = std::env::temp_dir().join(format!("lab-guest-files-{}", std::process::id()));
        fs::create_dir(&at).unwrap();
        let mut files = Files::make(vec![at.clone()], 2 << 20, 7).unwrap();
        let pages = files.read().unwrap();
        let (big, one) = (407, 300_000_u64.div_ceil(4096));
        assert!((big + one..big + 3 * one + 200).contains(&pages), "{pages}");
        let before = fs::read(at.join("big")).unwrap();
        assert_eq!(files.change(0, 3, Way::Cache).unwrap(), 3);
        let after = fs::read(at.join("big")).unwrap();
        assert_eq!(before.len(), after.len());
        assert!(before[..3 * PAGE_BYTES] != after[..3 * PAGE_BYTES]);
        assert!(before[3 * PAGE_BYTES..] == after[3 * PAGE_BYTES..]);
        assert_eq!(files.read().unwrap(), pages);
        assert_eq!(files.check().unwrap(), Checked { pages, wrong: 0, first_wrong: None });
        fs::write(at.join("big"), before).unwrap();
        assert_eq!(files.check().unwrap().wrong, 3);
        fs::remove_dir_all(&at).unwrap();
    }
}
