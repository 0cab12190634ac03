//! Real images: files of this host, images that `qemu-nbd` serves (with `qemu-img`
//! and `qemu-io`, from the path; without them these tests fail), and exports of
//! servers that fail, stall or violate the protocol.
//!
//! - `files`: raw files of this host
//! - `formats`: other formats, through a `qemu-nbd` of the reader
//! - `servers`: NBD servers of the storage, correct and faulty
//! - `odd`: such a server

mod files;
mod formats;
mod odd;
mod servers;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use storage::{Consumer, Failure, Item, Pages};

/// Bytes that don't repeat.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut out = Vec::with_capacity(bytes + 8);
    // Not byte by byte: this is compiled without optimization.
    while out.len() < bytes {
        out.extend_from_slice(&next());
    }
    out.truncate(bytes);
    out
}

/// The pages that were read, and those that failed.
#[derive(Default)]
struct Got {
    pages: Mutex<HashMap<u64, Vec<u8>>>,
    failed: Mutex<Vec<(u64, Failure)>>,
}

impl Got {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Checks that all of these were read, with the content of the image.
    fn check(&self, items: &[Item], content: &[u8]) {
        assert_eq!(*self.failed.lock().unwrap(), []);
        let pages = self.pages.lock().unwrap();
        for item in items {
            let from = usize::try_from(item.offset).unwrap();
            let mut expected = content[from..content.len().min(from + 4096)].to_vec();
            expected.resize(4096, 0);
            assert!(pages[&item.token] == expected, "{item:?}");
        }
        assert_eq!(pages.len(), items.len());
    }

    fn failed(&self) -> usize {
        self.failed.lock().unwrap().len()
    }
}

impl Consumer for Got {
    fn read(&self, read: Pages<'_>) {
        let mut pages = self.pages.lock().unwrap();
        for (token, page) in read.iter() {
            assert!(pages.insert(token, page.to_vec()).is_none(), "once");
        }
    }

    fn failed(&self, items: &[Item], why: &Failure) {
        let failed = items.iter().map(|item| (item.token, why.clone()));
        self.failed.lock().unwrap().extend(failed);
    }
}

/// Two thirds of the pages of an image, shifted by a sector, unordered.
fn wanted(image_bytes: usize) -> Vec<Item> {
    let pages = image_bytes as u64 / 4096;
    (0..pages)
        .filter(|page| page % 3 != 1)
        .map(|page| Item { offset: page * 7919 % pages * 4096 + 512, token: page })
        .collect()
}
