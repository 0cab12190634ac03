//! What a file must contain, as the guest recorded it: for each page the number of its content, and
//! how many bytes of it are there. No copy is kept, since the same fault could hit both.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::content::{self, Identity, Kind, PageWords};
use crate::memory::Checked;
use crate::{PAGE_BYTES, PAGE_WORDS};

/// Pages read at once.
const CHUNK_PAGES: usize = 64;

/// A page of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    /// Number of its content; without one it holds zeros.
    content: Option<u64>,
    /// Bytes that are there of that content; zeros follow.
    bytes: usize,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    path: PathBuf,
    seed: u64,
    bytes: usize,
    pages: Vec<Page>,
}

/// Writes the content of that number.
pub fn put(seed: u64, number: u64, page: &mut [u8]) {
    let mut words: PageWords = [0; PAGE_WORDS];
    content::write(Kind::Steps, Identity { seed, page: number, version: 0 }, &mut words);
    for (bytes, word) in page.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
}

impl Record {
    /// An empty file, whose contents depend on the seed.
    #[must_use]
    pub fn new(path: PathBuf, seed: u64) -> Self {
        Self { path, seed, bytes: 0, pages: Vec::new() }
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Records that a whole page was written with the content of that number.
    pub fn write(&mut self, page: usize, content: u64) {
        let end = (page + 1) * PAGE_BYTES;
        if end > self.bytes {
            self.truncate(end);
        }
        self.pages[page] = Page { content: Some(content), bytes: PAGE_BYTES };
    }

    /// Records that these pages became a hole. The length of the file stays.
    pub fn punch(&mut self, first: usize, count: usize) {
        self.pages.iter_mut().skip(first).take(count).for_each(|page| *page = Page::default());
    }

    /// Records a new length.
    pub fn truncate(&mut self, bytes: usize) {
        self.bytes = bytes;
        self.pages.resize(bytes.div_ceil(PAGE_BYTES), Page::default());
        if let Some(last) = self.pages.last_mut() {
            last.bytes = last.bytes.min(bytes - (bytes - 1) / PAGE_BYTES * PAGE_BYTES);
        }
    }

    /// Records that the file is now a copy of the other one.
    pub fn copy(&mut self, other: &Self) {
        self.bytes = other.bytes;
        self.pages.clone_from(&other.pages);
    }

    /// Reads the file, and compares it with the record.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn check(&self) -> io::Result<Checked> {
        let mut checked = Checked::default();
        let mut file = File::open(&self.path)?;
        let length = file.metadata()?.len();
        if length != self.bytes as u64 {
            let text = format!("{}-has-{length}-bytes-not-{}", self.path.display(), self.bytes);
            checked.add(Checked { pages: 0, wrong: 1, first_wrong: Some(text) });
        }
        let mut room = vec![0; CHUNK_PAGES * PAGE_BYTES];
        for (nth, pages) in self.pages.chunks(CHUNK_PAGES).enumerate() {
            let left = self.bytes - nth * room.len();
            let bytes = &mut room[..left.min(pages.len() * PAGE_BYTES)];
            match file.read_exact(bytes) {
                Ok(()) => {}
                // Its wrong length has been noted above.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            for (at, (page, found)) in pages.iter().zip(bytes.chunks(PAGE_BYTES)).enumerate() {
                checked.pages += 1;
                if let Some(text) = self.wrong(*page, found) {
                    let at = nth * CHUNK_PAGES + at;
                    let first_wrong = Some(format!("{}-page-{at}-{text}", self.path.display()));
                    checked.add(Checked { pages: 0, wrong: 1, first_wrong });
                }
            }
        }
        Ok(checked)
    }

    /// What is wrong with a page, of which the file may have only a part.
    fn wrong(&self, page: Page, found: &[u8]) -> Option<String> {
        let mut expected = [0; PAGE_BYTES];
        if let Some(number) = page.content {
            put(self.seed, number, &mut expected);
            expected[page.bytes..].fill(0);
        }
        // Byte by byte takes most of a check's time in a guest that is interpreted.
        if found == &expected[..found.len()] {
            return None;
        }
        let from = found.iter().zip(&expected).position(|(found, due)| found != due)?;
        let holds = if found.iter().all(|byte| *byte == 0) { "zeros" } else { "other" };
        Some(format!("content-{:?}-holds-{holds}-from-byte-{from}", page.content))
    }
}

/// Checks all these files.
///
/// # Errors
/// If one can't be read.
pub fn check<'r>(records: impl IntoIterator<Item = &'r Record>) -> io::Result<Checked> {
    let mut checked = Checked::default();
    for record in records {
        let named = |error| io::Error::other(format!("{}: {error}", record.path.display()));
        checked.add(record.check().map_err(named)?);
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::*;

    const SEED: u64 = 3;

    fn page(number: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        put(SEED, number, &mut page);
        page
    }

    fn with_file(name: &str, test: impl FnOnce(&File, Record)) {
        let path = std::env::temp_dir().join(format!("record-{name}-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        test(&file, Record::new(path.clone(), SEED));
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn recorded_changes_are_right() {
        with_file("done", |file, mut record| {
            let right = |record: &Record, pages| {
                let expected = Checked { pages, wrong: 0, first_wrong: None };
                assert_eq!(record.check().unwrap(), expected);
            };
            right(&record, 0);
            for at in 0..3 {
                file.write_all_at(&page(at), at * 4096).unwrap();
                record.write(usize::try_from(at).unwrap(), at);
            }
            right(&record, 3);
            for bytes in [9000, 5000, 20_000] {
                file.set_len(bytes).unwrap();
                record.truncate(usize::try_from(bytes).unwrap());
                right(&record, bytes.div_ceil(4096));
            }
            // Behind the end of what is there.
            file.write_all_at(&page(9), 6 * 4096).unwrap();
            record.write(6, 9);
            right(&record, 7);
            file.write_all_at(&[0; PAGE_BYTES], 6 * 4096).unwrap();
            record.punch(6, 5);
            right(&record, 7);
            let mut copy = Record::new(record.path().to_owned(), SEED);
            copy.copy(&record);
            assert_eq!((&copy, copy.bytes()), (&record, 7 * 4096));
            file.set_len(0).unwrap();
            record.truncate(0);
            right(&record, 0);
        });
    }

    #[test]
    fn what_is_lost_is_found() {
        with_file("lost", |file, mut record| {
            file.write_all_at(&page(7), 0).unwrap();
            record.write(0, 8);
            let checked = record.check().unwrap();
            assert_eq!((checked.pages, checked.wrong), (1, 1));
            assert!(checked.first_wrong.unwrap().contains("-page-0-content-Some(8)-holds-other"));
            // A tail that is not all zeros.
            record.write(0, 7);
            record.truncate(100);
            record.truncate(PAGE_BYTES);
            assert_eq!(record.check().unwrap().wrong, 1);
            file.set_len(100).unwrap();
            let checked = record.check().unwrap();
            assert!(checked.wrong > 0 && checked.first_wrong.unwrap().ends_with("not-4096"));
        });
    }
}
