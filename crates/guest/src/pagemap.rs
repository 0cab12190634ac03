//! `/proc/self/pagemap`: which page is at which of our addresses.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use cachemap::PAGE_BYTES;

const PRESENT: u64 = 1 << 63;
const FILE: u64 = 1 << 61;
const NUMBER: u64 = (1 << 55) - 1;

/// Reads the file.
#[derive(Debug)]
pub(crate) struct Pagemap(File);

impl Pagemap {
    pub(crate) fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// The pages from `address` on: a number for each that is present and belongs to a file.
    /// Without privilege, the number is 0.
    pub(crate) fn read(&self, address: usize, pages: &mut [Option<u64>]) -> io::Result<()> {
        let mut bytes = [0; 8192];
        let mut offset = address as u64 / PAGE_BYTES * 8;
        for pages in pages.chunks_mut(bytes.len() / 8) {
            let Some(room) = bytes.get_mut(..pages.len() * 8) else { continue };
            self.0.read_exact_at(room, offset)?;
            offset += room.len() as u64;
            for (page, word) in pages.iter_mut().zip(room.as_chunks().0) {
                let word = u64::from_ne_bytes(*word);
                *page = (word & PRESENT != 0 && word & FILE != 0).then_some(word & NUMBER);
            }
        }
        Ok(())
    }
}
