//! A disk image with content of the kinds that disks hold, computed from a seed, so that it can be
//! checked after a move without a copy of it.
//!
//! The first part belongs to the guest, which writes and checks it. After it come pieces of data
//! with holes between them, up to the disk's end: of four pieces two don't compress (media,
//! archives), one compresses like text, and one holds small files with zeros behind each.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use lab_guest::content::{self, Identity, Kind, PageWords};
use lab_guest::random::Random;
use lab_guest::{PAGE_BYTES, PAGE_WORDS};
use memmap2::MmapMut;
use rustix::fs::OFlags;

use lab::error::{FileContext, Result};
use lab::hosts::{Host, RUN_DIR};

/// Name of the image in a host's [`RUN_DIR`].
pub const FILE: &str = "disk.img";
/// QEMU's node name of the guest's disk.
pub const NODE: &str = "disk";

const PIECE_BYTES: usize = 1 << 20;
const PIECE_PAGES: usize = PIECE_BYTES / PAGE_BYTES;
/// A small file, and the zeros behind it.
const CELL_PAGES: usize = 16;
const SMALL_FILE_PAGES_MAX: usize = 8;

/// A disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its size, as the guest sees it.
    pub bytes: u64,
    /// Size of its first part, which the guest writes.
    pub guest_bytes: u64,
    /// Size of the data in the rest.
    pub data_bytes: u64,
    /// Makes its content different from that of other images.
    pub seed: u64,
}

impl Image {
    /// Makes the image on a host.
    ///
    /// # Errors
    /// If there is no room for it.
    pub fn make(&self, host: &Host) -> Result<()> {
        let path = host.run_dir.join(FILE);
        let file = open(&path, true).at("make", &path)?;
        self.write(&file).at("write", &path)
    }

    fn write(&self, file: &File) -> io::Result<()> {
        file.set_len(self.bytes)?;
        let mut bytes = piece()?;
        for nth in 0..self.data_bytes / PIECE_BYTES as u64 {
            self.fill(nth, &mut bytes);
            file.write_all_at(&bytes, self.offset(nth))?;
        }
        file.sync_all()
    }

    /// QEMU's arguments for the disk, as libvirt would give them: past the host's page cache, if
    /// its file system can do that.
    #[must_use]
    pub fn arguments(host: &Host) -> Vec<String> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        let there = host.run_dir.join(FILE);
        let opened = OpenOptions::new().read(true).custom_flags(direct).open(there);
        let direct = if opened.is_ok() { "on" } else { "off" };
        let both = format!("cache.direct={direct},discard=unmap");
        let file = format!("driver=file,node-name=disk-file,filename={RUN_DIR}/{FILE},{both}");
        let node = format!("driver=raw,node-name={NODE},file=disk-file,{both}");
        let device = format!("virtio-blk-pci,drive={NODE},id=vda");
        ["-blockdev", &file, "-blockdev", &node, "-device", &device].map(str::to_owned).to_vec()
    }

    /// Whether a host's image has the right content outside the guest's part.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn is_intact(&self, host: &Host) -> Result<bool> {
        let path = host.run_dir.join(FILE);
        let file = open(&path, false).at("open", &path)?;
        self.is_right(&file).at("read", &path)
    }

    fn is_right(&self, file: &File) -> io::Result<bool> {
        if file.metadata()?.len() != self.bytes {
            return Ok(false);
        }
        let (mut read, mut right) = (piece()?, piece()?);
        let mut next = 0;
        for offset in (self.guest_bytes..self.bytes).step_by(PIECE_BYTES) {
            if next < self.data_bytes / PIECE_BYTES as u64 && self.offset(next) == offset {
                self.fill(next, &mut right);
                next += 1;
            } else {
                right.fill(0);
            }
            file.read_exact_at(&mut read, offset)?;
            if read[..] != right[..] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Space that a host's image takes up, in bytes.
    ///
    /// # Errors
    /// If it doesn't exist.
    pub fn allocated_bytes(host: &Host) -> Result<u64> {
        let path = host.run_dir.join(FILE);
        Ok(fs::metadata(&path).at("look at", &path)?.blocks() * 512)
    }

    /// Offset of a piece of data: pieces are spread evenly.
    fn offset(&self, nth: u64) -> u64 {
        let piece = PIECE_BYTES as u64;
        let places = (self.bytes - self.guest_bytes) / piece;
        let pieces = (self.data_bytes / piece).max(1);
        self.guest_bytes + nth * places / pieces * piece
    }

    fn fill(&self, nth: u64, piece: &mut [u8]) {
        let mut random = Random::new(self.seed, nth);
        let mut file_pages = 0;
        for (at, bytes) in piece.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().enumerate() {
            if at % CELL_PAGES == 0 {
                file_pages = 1 + random.below(SMALL_FILE_PAGES_MAX);
            }
            let kind = match nth % 4 {
                0 | 1 => Kind::Random,
                2 => Kind::Text,
                _ if at % CELL_PAGES >= file_pages => Kind::Zero,
                _ if (at / CELL_PAGES).is_multiple_of(2) => Kind::Text,
                _ => Kind::Random,
            };
            let page = nth * PIECE_PAGES as u64 + at as u64;
            let mut words: PageWords = [0; PAGE_WORDS];
            content::write(kind, Identity { seed: self.seed, page, version: 0 }, &mut words);
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                *bytes = word.to_le_bytes();
            }
        }
    }
}

/// Page-aligned memory, which I/O past the page cache needs.
fn piece() -> io::Result<MmapMut> {
    MmapMut::map_anon(PIECE_BYTES)
}

/// Opens an image past the page cache where that is possible, so that each run finds the cache in
/// the same state.
fn open(path: &Path, new: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(new).create_new(new);
    let direct = OFlags::DIRECT.bits().cast_signed();
    match options.custom_flags(direct).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            options.create_new(false).create(new).custom_flags(0).open(path)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Image =
        Image { bytes: 40 << 20, guest_bytes: 4 << 20, data_bytes: 12 << 20, seed: 1 };

    fn made() -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let file = open(&dir.path().join(FILE), true).unwrap();
        SMALL.write(&file).unwrap();
        (dir, file)
    }

    #[test]
    fn an_image_holds_data_and_holes() {
        let (_dir, file) = made();
        assert!(SMALL.is_right(&file).unwrap());
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), SMALL.bytes);
        assert!((12 << 20..13 << 20).contains(&(metadata.blocks() * 512)));
        let offsets: Vec<u64> = (0..12).map(|nth| SMALL.offset(nth) >> 20).collect();
        assert_eq!(offsets, [4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37]);
    }

    #[test]
    fn differences_outside_the_guests_part_are_found() {
        let mut page = piece().unwrap();
        page.fill(7);
        for (mib, right) in [(0, true), (3, true), (4, false), (5, false), (39, false)] {
            let (_dir, file) = made();
            file.write_all_at(&page[..PAGE_BYTES], mib << 20).unwrap();
            assert_eq!(SMALL.is_right(&file).unwrap(), right, "{mib}");
        }
        let (_dir, file) = made();
        file.set_len(SMALL.bytes - 4096).unwrap();
        assert!(!SMALL.is_right(&file).unwrap());
    }
}
