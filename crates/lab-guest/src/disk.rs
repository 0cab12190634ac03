//! A disk whose content is known: filled, rewritten in place, and checked. It
//! is read and written past the guest's own cache, so that a check sees what is
//! on the disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::content::{self, Identity, Kind, PageWords};
use crate::memory::Checked;
use crate::random::Random;
use crate::{PAGE_BYTES, PAGE_WORDS};

/// A page of the disk in memory, where direct access can reach it.
#[repr(align(4096))]
struct Aligned([u8; PAGE_BYTES]);

/// The part of a disk that is written.
pub struct Disk {
    file: File,
    seed: u64,
    versions: Vec<u32>,
    random: Random,
    written: u64,
    buffer: Box<Aligned>,
}

impl Disk {
    /// Fills the first `bytes` of the disk at `path`.
    ///
    /// # Errors
    /// If it isn't there, or is too small.
    pub fn fill(path: &Path, seed: u64, bytes: u64) -> io::Result<Self> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)?;
        Self::of(file, seed, bytes)
    }

    fn of(file: File, seed: u64, bytes: u64) -> io::Result<Self> {
        let count = usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        let random = Random::new(seed, u64::MAX - 1);
        let buffer = Box::new(Aligned([0; PAGE_BYTES]));
        let mut disk = Self { file, seed, versions: vec![0; count], random, written: 0, buffer };
        for page in 0..count {
            disk.put(page)?;
        }
        disk.file.sync_all()?;
        Ok(disk)
    }

    /// Rewrites `count` pages.
    ///
    /// # Errors
    /// If the disk can't be written to.
    pub fn write(&mut self, count: usize) -> io::Result<()> {
        for _ in 0..count {
            let page = self.random.below(self.versions.len().max(1));
            let Some(version) = self.versions.get_mut(page) else { return Ok(()) };
            *version = version.wrapping_add(1);
            self.put(page)?;
            self.written += 1;
        }
        Ok(())
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
        for page in 0..self.versions.len() {
            let Aligned(bytes) = &mut *self.buffer;
            self.file.read_exact_at(bytes, (page * PAGE_BYTES) as u64)?;
            let mut words: PageWords = [0; PAGE_WORDS];
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            let identity = self.identity(page);
            checked.pages += 1;
            if content::first_wrong(Kind::Random, identity, &words).is_some() {
                checked.wrong += 1;
                checked.first_wrong.get_or_insert_with(|| {
                    let found = content::explain(Kind::Random, identity, &words);
                    format!("disk-page-{page}-version-{}-holds-{found}", identity.version)
                });
            }
        }
        Ok(checked)
    }

    fn identity(&self, page: usize) -> Identity {
        Identity { seed: self.seed, page: page as u64, version: self.versions[page] }
    }

    fn put(&mut self, page: usize) -> io::Result<()> {
        let mut words: PageWords = [0; PAGE_WORDS];
        content::write(Kind::Random, self.identity(page), &mut words);
        let Aligned(bytes) = &mut *self.buffer;
        for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        self.file.write_all_at(bytes, (page * PAGE_BYTES) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_the_disk_is_checked() {
        let path = std::env::temp_dir().join(format!("lab-guest-disk-{}", std::process::id()));
        let mut open = OpenOptions::new();
        let file = open.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let mut disk = Disk::of(file, 3, 16 * PAGE_BYTES as u64).unwrap();
        disk.write(40).unwrap();
        assert_eq!(disk.written(), 40);
        assert_eq!(disk.check().unwrap(), Checked { pages: 16, wrong: 0, first_wrong: None });
        disk.file.write_all_at(&[0; PAGE_BYTES], 5 * PAGE_BYTES as u64).unwrap();
        let checked = disk.check().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(checked.wrong, 1);
        let first = checked.first_wrong.unwrap();
        assert!(first.starts_with("disk-page-5-") && first.ends_with("holds-zeros"), "{first}");
    }
}
