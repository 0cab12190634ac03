//! A disk with known content: filled, rewritten in place, and checked. Access bypasses the guest's
//! own cache, so a check sees what is on the disk. Or a file that is in memory only, and so
//! migrates with it.
//!
//! Like programs that work on files, it can mix small and large writes, and flush now and then.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::content::{self, Identity, Kind, PageWords};
use crate::memory::Checked;
use crate::random::Random;
use crate::{PAGE_BYTES, PAGE_WORDS};

/// Most pages that are read or written at once.
const RUN_PAGES_MAX: usize = 64;

/// Pages of the disk in memory, aligned for direct access.
#[repr(align(4096))]
struct Aligned([u8; RUN_PAGES_MAX * PAGE_BYTES]);

/// How a disk is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Habits {
    /// Most pages of one write. Writes have one page, two, four, and so on up to this, equally
    /// often.
    pub run_pages_max: usize,
    /// Pages after which the disk is flushed; 0 for never.
    pub flush_pages: u64,
}

impl Habits {
    /// From orders, which may leave both at 0.
    #[must_use]
    pub fn new(run_pages_max: u64, flush_bytes: u64) -> Self {
        let run = usize::try_from(run_pages_max).unwrap_or(RUN_PAGES_MAX);
        let flush_pages = flush_bytes.div_ceil(PAGE_BYTES as u64);
        Self { run_pages_max: run.clamp(1, RUN_PAGES_MAX), flush_pages }
    }
}

/// The part of a disk that is written.
pub struct Disk {
    file: File,
    seed: u64,
    habits: Habits,
    versions: Vec<u32>,
    random: Random,
    /// Pages written beyond what was due.
    ahead: usize,
    written: u64,
    unflushed: u64,
    buffer: Box<Aligned>,
}

impl Disk {
    /// Fills the first `bytes` of the disk at `path`.
    ///
    /// # Errors
    /// If the disk doesn't exist, or is too small.
    pub fn fill(path: &Path, seed: u64, bytes: u64, habits: Habits) -> io::Result<Self> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)?;
        Self::of(file, seed, bytes, habits)
    }

    /// Makes a file of `bytes` at `path`, on a file system in memory.
    ///
    /// # Errors
    /// If there is no room.
    pub fn file(path: &Path, seed: u64, bytes: u64, habits: Habits) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path)?;
        Self::of(file, seed, bytes, habits)
    }

    fn of(file: File, seed: u64, bytes: u64, habits: Habits) -> io::Result<Self> {
        let count = usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        let mut disk = Self {
            file,
            seed,
            habits,
            versions: vec![0; count],
            random: Random::new(seed, u64::MAX - 1),
            ahead: 0,
            written: 0,
            unflushed: 0,
            buffer: Box::new(Aligned([0; RUN_PAGES_MAX * PAGE_BYTES])),
        };
        for page in (0..count).step_by(RUN_PAGES_MAX) {
            disk.put(page, RUN_PAGES_MAX.min(count - page))?;
        }
        disk.file.sync_all()?;
        Ok(disk)
    }

    /// Rewrites `count` pages; if more, then fewer at the next call.
    ///
    /// # Errors
    /// If the disk can't be written to.
    pub fn write(&mut self, count: usize) -> io::Result<()> {
        while self.ahead < count {
            let run = self.run().min(self.versions.len());
            if run == 0 {
                return Ok(());
            }
            let page = self.random.below(self.versions.len() - run + 1);
            for version in &mut self.versions[page..page + run] {
                *version = version.wrapping_add(1);
            }
            self.put(page, run)?;
            self.written += run as u64;
            self.unflushed += run as u64;
            self.ahead += run;
            if self.habits.flush_pages > 0 && self.unflushed >= self.habits.flush_pages {
                self.file.sync_data()?;
                self.unflushed = 0;
            }
        }
        self.ahead -= count;
        Ok(())
    }

    /// Pages of the next write.
    fn run(&mut self) -> usize {
        let sizes = self.habits.run_pages_max.ilog2() as usize + 1;
        1 << self.random.below(sizes)
    }

    /// Pages rewritten so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Reads and checks every page.
    ///
    /// # Errors
    /// If the disk can't be read.
    pub fn check(&mut self) -> io::Result<Checked> {
        let mut checked = Checked::default();
        let count = self.versions.len();
        for start in (0..count).step_by(RUN_PAGES_MAX) {
            let run = RUN_PAGES_MAX.min(count - start);
            let Aligned(bytes) = &mut *self.buffer;
            let bytes = &mut bytes[..run * PAGE_BYTES];
            self.file.read_exact_at(bytes, (start * PAGE_BYTES) as u64)?;
            for page in start..start + run {
                self.check_page(page, page - start, &mut checked);
            }
        }
        Ok(checked)
    }

    /// Checks a page that is in the buffer at index `at`.
    fn check_page(&self, page: usize, at: usize, checked: &mut Checked) {
        let bytes = &self.buffer.0[at * PAGE_BYTES..(at + 1) * PAGE_BYTES];
        let mut words: PageWords = [0; PAGE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let identity = self.identity(page);
        checked.pages += 1;
        if content::first_wrong(Kind::Steps, identity, &words).is_some() {
            checked.wrong += 1;
            checked.first_wrong.get_or_insert_with(|| {
                let found = content::explain(Kind::Steps, identity, &words);
                format!("disk-page-{page}-version-{}-holds-{found}", identity.version)
            });
        }
    }

    fn identity(&self, page: usize) -> Identity {
        Identity { seed: self.seed, page: page as u64, version: self.versions[page] }
    }

    fn put(&mut self, start: usize, run: usize) -> io::Result<()> {
        let mut words: PageWords = [0; PAGE_WORDS];
        for page in start..start + run {
            content::write(Kind::Steps, self.identity(page), &mut words);
            let at = (page - start) * PAGE_BYTES;
            let bytes = &mut self.buffer.0[at..at + PAGE_BYTES];
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                *bytes = word.to_le_bytes();
            }
        }
        let bytes = &self.buffer.0[..run * PAGE_BYTES];
        self.file.write_all_at(bytes, (start * PAGE_BYTES) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_a_file(name: &str, pages: u64, habits: Habits, test: impl FnOnce(Disk)) {
        let own = std::process::id();
        let path = std::env::temp_dir().join(format!("lab-guest-disk-{name}-{own}"));
        let mut open = OpenOptions::new();
        let file = open.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        test(Disk::of(file, 3, pages * PAGE_BYTES as u64, habits).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_on_the_disk_is_checked() {
        in_a_file("checked", 16, Habits::new(0, 0), |mut disk| {
            disk.write(40).unwrap();
            assert_eq!(disk.written(), 40);
            assert_eq!(disk.check().unwrap(), Checked { pages: 16, wrong: 0, first_wrong: None });
            disk.file.write_all_at(&[0; PAGE_BYTES], 5 * PAGE_BYTES as u64).unwrap();
            let checked = disk.check().unwrap();
            assert_eq!(checked.wrong, 1);
            let first = checked.first_wrong.unwrap();
            assert!(first.starts_with("disk-page-5-") && first.ends_with("holds-zeros"), "{first}");
        });
    }

    #[test]
    fn long_writes_keep_to_what_is_due() {
        for pages in [1, 5, 150] {
            in_a_file(&pages.to_string(), pages, Habits::new(32, 40_000), |mut disk| {
                for _ in 0..300 {
                    disk.write(3).unwrap();
                }
                assert!((900..932).contains(&disk.written()), "{}", disk.written());
                assert_eq!(disk.check().unwrap(), Checked { pages, wrong: 0, first_wrong: None });
            });
        }
        in_a_file("empty", 0, Habits::new(8, 0), |mut disk| {
            disk.write(3).unwrap();
            assert_eq!((disk.written(), disk.check().unwrap().pages), (0, 0));
        });
    }
}
