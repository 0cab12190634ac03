//! Files on a disk that a guest has in its page cache: their names, sizes and content. The lab
//! makes them before the guest boots; the guest reads, writes and checks them. Both compute each
//! page from its file's number, its place in it and its version.

mod load;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use guest_pages::orders::Use;
pub use load::Load;

use crate::content::{self, Identity, Kind, PageWords};
use crate::random::Random;
use crate::{PAGE_BYTES, PAGE_WORDS};

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of a web server's file: 300 KB, as in the paper, so that it ends within a page.
const WEB_BYTES: u64 = 300_000;
/// Sizes of new files of a mail server, all equally frequent: the paper found half a megabyte
/// contiguous with Postmark.
const MAIL_PAGES_MADE: std::ops::Range<u64> = 16..240;
const MAIL_PAGES_MEAN: u64 = (MAIL_PAGES_MADE.start + MAIL_PAGES_MADE.end) / 2;
/// Has no common divisor with the number of sizes, so the next file's size is far from this one's.
const MAIL_PAGES_STEP: u64 = 87;
/// Size up to which they grow.
const MAIL_PAGES_MAX: u64 = 256;
/// Tables of the database.
const TABLES: u64 = 4;
/// Pages of a piece, which a database reads at once. Pieces in use are chosen at random, so cached
/// pages come in runs of 18, which the paper found for TPC-C.
const PIECE_PAGES: u64 = 8;
const IN_USE_PERCENT: u64 = 55;
/// Directories over which files are spread, so that none is large.
const DIRECTORIES: u64 = 256;
/// Pages written at once.
const CHUNK_PAGES: u64 = 64;

/// Most pages that a file may have; page numbers depend on it.
fn file_pages_max(kind: Use) -> u64 {
    match kind {
        Use::None | Use::Small => 1,
        Use::Web => 128,
        Use::Mail => MAIL_PAGES_MAX,
        Use::Database => 1 << 17,
        Use::Reading | Use::Big => 1 << 20,
    }
}

/// Files of which so many bytes are in use, and so in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What they are for.
    pub kind: Use,
    /// Bytes of them that are cached.
    pub cached_bytes: u64,
    /// Makes their content different from that of others.
    pub seed: u64,
}

impl Layout {
    /// How many there are at first. Those of a mail server have about the bytes that they should.
    #[must_use]
    pub fn files(&self) -> u64 {
        match self.kind {
            Use::None => 0,
            Use::Web => self.cached_bytes / WEB_BYTES.next_multiple_of(PAGE),
            Use::Mail => self.cached_bytes / (MAIL_PAGES_MEAN * PAGE),
            Use::Database => TABLES,
            Use::Reading | Use::Big => 1,
            Use::Small => self.cached_bytes / PAGE,
        }
    }

    /// The size of a file as it is made.
    #[must_use]
    pub fn bytes_of(&self, file: u64) -> u64 {
        match self.kind {
            Use::None => 0,
            Use::Web => WEB_BYTES,
            Use::Mail => {
                let sizes = MAIL_PAGES_MADE.end - MAIL_PAGES_MADE.start;
                (MAIL_PAGES_MADE.start + file * MAIL_PAGES_STEP % sizes) * PAGE
            }
            Use::Database => {
                let all = self.cached_bytes * 100 / IN_USE_PERCENT;
                (all / TABLES).next_multiple_of(PIECE_PAGES * PAGE)
            }
            Use::Reading | Use::Big => self.cached_bytes,
            Use::Small => PAGE,
        }
    }

    /// Bytes of all of them as they are made.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (0..self.files()).map(|file| self.bytes_of(file).next_multiple_of(PAGE)).sum()
    }

    /// Path of a file below `at`.
    #[must_use]
    pub fn path(&self, at: &Path, file: u64) -> PathBuf {
        at.join(directory(file)).join(file.to_string())
    }

    /// Whether a page of a file is in use; only a database has pages that are not.
    #[must_use]
    pub fn in_use(&self, file: u64, page: u64) -> bool {
        let piece = file * file_pages_max(self.kind) + page / PIECE_PAGES;
        self.kind != Use::Database
            || (Random::new(!self.seed, piece).draw() >> 32) % 100 < IN_USE_PERCENT
    }

    /// Makes all files below a directory, which must be empty.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn make(&self, at: &Path) -> io::Result<()> {
        for directory in (0..DIRECTORIES).map(directory) {
            fs::create_dir(at.join(directory))?;
        }
        let mut chunk = Vec::new();
        (0..self.files()).try_for_each(|file| self.make_one(at, file, &mut chunk))
    }

    /// Makes a file.
    fn make_one(&self, at: &Path, file: u64, chunk: &mut Vec<u8>) -> io::Result<()> {
        let bytes = self.bytes_of(file);
        let mut into = File::create(self.path(at, file))?;
        for first in (0..bytes.div_ceil(PAGE)).step_by(as_usize(CHUNK_PAGES)) {
            let now = (bytes - first * PAGE).min(CHUNK_PAGES * PAGE);
            chunk.resize(as_usize(now.next_multiple_of(PAGE)), 0);
            for (nth, page) in chunk.chunks_mut(PAGE_BYTES).enumerate() {
                self.fill(file, first + nth as u64, 0, page);
            }
            into.write_all(&chunk[..as_usize(now)])?;
        }
        Ok(())
    }

    fn identity(&self, file: u64, page: u64, version: u32) -> Identity {
        // An identity has room for 32 bits of it.
        let page = (file * file_pages_max(self.kind) + page) & u64::from(u32::MAX);
        Identity { seed: self.seed, page, version }
    }

    /// Writes what a page holds in a version.
    fn fill(&self, file: u64, page: u64, version: u32, bytes: &mut [u8]) {
        let words = self.words(file, page, version);
        for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
    }

    fn words(&self, file: u64, page: u64, version: u32) -> PageWords {
        let mut words: PageWords = [0; PAGE_WORDS];
        content::write(Kind::Steps, self.identity(file, page, version), &mut words);
        words
    }

    /// Whether a page, or its part before the end of the file, holds what it must.
    #[must_use]
    pub fn is_right(&self, file: u64, page: u64, version: u32, bytes: &[u8]) -> bool {
        let words = self.words(file, page, version);
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .zip(bytes)
            .all(|(one, other)| one == *other)
    }

    /// Checks only the first word, which costs a reader next to nothing.
    fn begins_right(&self, file: u64, page: u64, version: u32, bytes: &[u8]) -> bool {
        let Identity { seed, page, version } = self.identity(file, page, version);
        let first = Random::new(seed, page << 32 | u64::from(version)).draw();
        bytes.first_chunk() == Some(&first.to_le_bytes())
    }
}

fn directory(file: u64) -> String {
    format!("d{}", file % DIRECTORIES)
}

/// For numbers far below the limits of `usize`.
fn as_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(kind: Use, cached_bytes: u64) -> Layout {
        Layout { kind, cached_bytes, seed: 7 }
    }

    #[test]
    fn numbers_and_uses_are_the_same() {
        for kind in (1..).map_while(Use::of) {
            assert_eq!(Use::of(kind.number()), Some(kind));
        }
        assert_eq!(Use::of(7), None);
    }

    #[test]
    fn what_is_cached_has_the_bytes_that_it_should() {
        let wanted = 340 << 20;
        for kind in [Use::Web, Use::Mail, Use::Database, Use::Reading, Use::Big, Use::Small] {
            let layout = layout(kind, wanted);
            let in_use = |file| {
                let pages = 0..layout.bytes_of(file).div_ceil(PAGE);
                pages.filter(|page| layout.in_use(file, *page)).count() as u64 * PAGE
            };
            let cached: u64 = (0..layout.files()).map(in_use).sum();
            assert!(cached.abs_diff(wanted) < wanted / 50, "{kind:?}: {cached}");
            let pages_max = (0..layout.files()).map(|file| layout.bytes_of(file) / PAGE).max();
            assert!(pages_max <= Some(file_pages_max(kind)), "{kind:?}");
        }
    }

    #[test]
    fn a_database_uses_runs_as_long_as_the_papers() {
        let layout = layout(Use::Database, 340 << 20);
        let pages = layout.bytes_of(0) / PAGE;
        let used: Vec<bool> = (0..pages).map(|page| layout.in_use(0, page)).collect();
        let runs = used.windows(2).filter(|pair| pair[0] && !pair[1]).count();
        let length = used.iter().filter(|used| **used).count() / runs;
        assert!((15..22).contains(&length), "{length}");
    }

    #[test]
    fn a_page_is_right_in_its_version_and_place_only() {
        let layout = layout(Use::Mail, 1 << 20);
        let mut bytes = [0; PAGE_BYTES];
        layout.fill(5, 2, 1, &mut bytes);
        for (file, page, version, right) in
            [(5, 2, 1, true), (5, 2, 0, false), (5, 3, 1, false), (6, 2, 1, false)]
        {
            assert_eq!(layout.is_right(file, page, version, &bytes), right);
            assert_eq!(layout.begins_right(file, page, version, &bytes), right);
        }
        assert!(layout.is_right(5, 2, 1, &bytes[..100]));
        bytes[4095] ^= 1;
        assert!(!layout.is_right(5, 2, 1, &bytes));
    }
}
