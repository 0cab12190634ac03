//! Names that a scanner made of a VM's pages, for the time when the VM moves.
//!
//! Next to each name is the fingerprint of the content that it names, of the same copy. A page that
//! has this fingerprint when it is sent has that name, and is not hashed again, which takes several
//! times as long. The fingerprint is of the bytes that are sent, so a page that changed is named
//! anew.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use page::{Borrowed, Buffer, Reserve};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::fingerprint::{FINGERPRINT_BYTES, Fingerprint, FingerprintKey};
use crate::{NAME_BYTES, Name};

/// The most memory for the earlier names of all VMs of an agent: those of 140 GiB of RAM.
pub(crate) const EARLIER_NAMES_BYTES_MAX: usize = 1 << 30;

/// Pages whose names have one lock, and memory that goes back to the system when they leave.
pub(crate) const CHUNK_PAGES: usize = 4096;
const CHUNK_BYTES: usize = CHUNK_PAGES * ENTRY_BYTES;

/// A page's name, and the fingerprint of the content that it names. Zeros: the page has none.
type Entry = [u8; ENTRY_BYTES];
const ENTRY_BYTES: usize = NAME_BYTES + FINGERPRINT_BYTES;
const NO_ENTRY: Entry = [0; ENTRY_BYTES];

/// Entries of pages in order. Empty until one of them has a name.
type Chunk = RwLock<Buffer>;

/// The names of one VM's pages, as they were when a scanner came by.
pub struct EarlierNames {
    /// None: nothing is kept.
    key: Option<Arc<FingerprintKey>>,
    pages: u64,
    /// Made with the first names.
    chunks: OnceLock<Box<[Chunk]>>,
    memory: Mutex<Borrowed>,
    is_kept: AtomicBool,
}

impl fmt::Debug for EarlierNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EarlierNames").finish_non_exhaustive()
    }
}

impl EarlierNames {
    /// None yet, for a VM with so many pages. Their memory is borrowed from `reserve`.
    pub(crate) fn new(
        key: Option<Arc<FingerprintKey>>,
        pages: u64,
        reserve: &Arc<Reserve>,
    ) -> Self {
        let memory = Mutex::new(Borrowed::new(reserve, 0));
        Self { key, pages, chunks: OnceLock::new(), memory, is_kept: AtomicBool::new(false) }
    }

    /// Keeps names from now on, or drops them.
    pub(crate) fn keep(&self, is_kept: bool) {
        if self.is_kept.swap(is_kept, Relaxed) && !is_kept {
            for chunk in self.made().unwrap_or_default() {
                let mut chunk = chunk.write();
                if !chunk.is_empty() {
                    *chunk = Buffer::default();
                    self.discharge(CHUNK_BYTES);
                }
            }
        }
    }

    /// The fingerprint of a page's bytes. None if no names are kept.
    pub(crate) fn fingerprint(&self, page: &[u8]) -> Option<Fingerprint> {
        let key = self.key.as_ref().filter(|_| self.is_kept.load(Relaxed))?;
        Some(key.of(page))
    }

    /// Replaces the names of so many `pages` from `first` on, all of one chunk. Each name has its
    /// fingerprint, or none has one: then there is nothing to keep.
    pub(crate) fn note(
        &self,
        (first, pages): (u64, usize),
        named: &[(u64, Name)],
        fingerprints: &[Fingerprint],
    ) {
        let chunks = if fingerprints.is_empty() { self.made() } else { self.chunks() };
        let found = place(first).zip(chunks);
        let Some((chunk, nth)) = found.and_then(|((at, nth), chunks)| Some((chunks.get(at)?, nth)))
        else {
            return;
        };
        let mut chunk = chunk.write();
        if chunk.is_empty() {
            if fingerprints.is_empty() || !self.charge(CHUNK_BYTES) {
                return;
            }
            *chunk = Buffer::new(CHUNK_BYTES);
        }
        let (entries, _) = chunk.as_chunks_mut::<ENTRY_BYTES>();
        // Only what is there: a buffer has no memory where nothing was written.
        let before = entries.iter_mut().skip(nth).take(pages);
        before.filter(|entry| **entry != NO_ENTRY).for_each(|entry| *entry = NO_ENTRY);
        for ((page, name), fingerprint) in named.iter().zip(fingerprints) {
            if let Some((_, nth)) = place(*page) {
                entries[nth] = entry(name, *fingerprint);
            }
        }
    }

    /// Reads names on one thread. The scanner may have to wait until the result is dropped.
    #[must_use]
    pub fn read(&self) -> NamesReader<'_> {
        NamesReader { names: self, at: 0, chunk: None }
    }

    /// The memory that they take.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.memory.lock().bytes()
    }

    fn made(&self) -> Option<&[Chunk]> {
        self.chunks.get().map(|chunks| &**chunks)
    }

    /// Makes the chunks if need be. None if there is no memory for them. Only the scanner's thread
    /// calls this.
    fn chunks(&self) -> Option<&[Chunk]> {
        if self.chunks.get().is_none() {
            let count = usize::try_from(self.pages.div_ceil(CHUNK_PAGES as u64)).ok()?;
            if !self.charge(count.checked_mul(size_of::<Chunk>())?) {
                return None;
            }
            let _ = self.chunks.set((0..count).map(|_| Chunk::default()).collect());
        }
        self.made()
    }

    fn charge(&self, more: usize) -> bool {
        let mut memory = self.memory.lock();
        let bytes = memory.bytes().saturating_add(more);
        memory.grow_to(bytes)
    }

    fn discharge(&self, less: usize) {
        let mut memory = self.memory.lock();
        let bytes = memory.bytes().saturating_sub(less);
        memory.shrink_to(bytes);
    }
}

fn entry(name: &Name, fingerprint: Fingerprint) -> Entry {
    let mut entry = NO_ENTRY;
    entry[..NAME_BYTES].copy_from_slice(&name.0);
    entry[NAME_BYTES..].copy_from_slice(&fingerprint.0);
    entry
}

/// A page's chunk, and its entry there.
fn place(page: u64) -> Option<(usize, usize)> {
    let page = usize::try_from(page).ok()?;
    Some((page / CHUNK_PAGES, page % CHUNK_PAGES))
}

/// One thread's view of a VM's names. It locks a chunk until it comes to another one, not for each
/// page.
pub struct NamesReader<'n> {
    names: &'n EarlierNames,
    /// Which chunk is locked, if any is.
    at: usize,
    chunk: Option<RwLockReadGuard<'n, Buffer>>,
}

impl NamesReader<'_> {
    /// The name of a page with these bytes, if the page had them when it was named.
    ///
    /// # Panics
    /// If the bytes are not one page.
    pub fn name(&mut self, page: u64, bytes: &[u8]) -> Option<Name> {
        let (names, (at, nth)) = (self.names, place(page)?);
        let key = names.key.as_ref()?;
        if self.chunk.is_none() || self.at != at {
            // One lock at a time.
            self.chunk = None;
            self.chunk = Some(names.made()?.get(at)?.read());
            self.at = at;
        }
        let (entries, _) = self.chunk.as_ref()?.as_chunks::<ENTRY_BYTES>();
        let entry = entries.get(nth).filter(|entry| **entry != NO_ENTRY)?;
        let (name, fingerprint) = entry.split_first_chunk()?;
        (key.of(bytes).0 == *fingerprint).then_some(Name(*name))
    }
}

#[cfg(test)]
mod tests {
    use page::PAGE_BYTES;
    use proptest::prelude::*;

    use super::*;
    use crate::{Domain, Key};

    const CHUNK: u64 = CHUNK_PAGES as u64;
    const PAGES: u64 = 3 * CHUNK;

    fn named(byte: u8) -> Name {
        Key::new(b"secret", &Domain::default()).name(&[byte; PAGE_BYTES])
    }

    fn names(reserve: &Arc<Reserve>) -> EarlierNames {
        let key = FingerprintKey::draw().unwrap();
        let names = EarlierNames::new(Some(Arc::from(key)), PAGES, reserve);
        names.keep(true);
        names
    }

    /// A scanner comes by 256 pages, of which these are filled with these bytes.
    fn scan(names: &EarlierNames, first: u64, pages: &[(u64, u8)]) {
        let found: Vec<_> = pages.iter().map(|(page, byte)| (*page, named(*byte))).collect();
        let fingerprints: Vec<_> =
            pages.iter().filter_map(|(_, byte)| names.fingerprint(&[*byte; PAGE_BYTES])).collect();
        names.note((first, 256), &found, &fingerprints);
    }

    /// The name of a page that is sent with these bytes.
    fn sent(names: &EarlierNames, page: u64, byte: u8) -> Option<Name> {
        names.read().name(page, &[byte; PAGE_BYTES])
    }

    #[test]
    fn a_page_has_its_name_until_it_changes() {
        let names = names(&Reserve::new(1 << 20));
        assert_eq!(sent(&names, 0, 7), None, "it was not scanned yet");
        scan(&names, 0, &[(0, 7), (255, 8)]);
        scan(&names, CHUNK, &[(CHUNK, 9)]);
        let all = [(0, 7), (255, 8), (CHUNK, 9)].map(|(page, byte)| sent(&names, page, byte));
        assert_eq!(all, [7, 8, 9].map(|byte| Some(named(byte))));
        for (page, byte) in [(0, 9), (255, 7), (1, 7), (256, 7), (2 * CHUNK, 9), (PAGES, 7)] {
            assert_eq!(sent(&names, page, byte), None, "page {page}");
        }
        // Page 0 is zero now, and another one has a name.
        scan(&names, 0, &[(4, 9), (255, 8)]);
        scan(&names, 256, &[(256, 7)]);
        let mut reader = names.read();
        let all = [(0, 7), (4, 9), (CHUNK, 9), (2 * CHUNK, 9), (255, 8), (256, 7)];
        let all = all.map(|(page, byte)| reader.name(page, &[byte; PAGE_BYTES]));
        let expected = [None, Some(9), Some(9), None, Some(8), Some(7)];
        assert_eq!(all, expected.map(|byte| byte.map(named)));
    }

    /// A guest that knew the key could have a page go by the name of another one.
    #[test]
    fn what_is_forged_without_the_key_is_named_anew() {
        let [page, forged] = FingerprintKey::of_seed(&[1; 32]).collision();
        let reserve = Reserve::new(1 << 20);
        let known = FingerprintKey::of_seed(&[1; 32]);
        let known = EarlierNames::new(Some(Arc::from(known)), PAGES, &reserve);
        known.keep(true);
        for (names, expected) in [(known, Some(named(1))), (names(&reserve), None)] {
            let fingerprint = names.fingerprint(&page).unwrap();
            names.note((0, 1), &[(0, named(1))], &[fingerprint]);
            assert_eq!(names.read().name(0, &page), Some(named(1)));
            assert_eq!(names.read().name(0, &forged), expected);
        }
    }

    #[test]
    fn memory_is_bounded_and_given_back() {
        // Of a page at most 28 bytes.
        const _: () = assert!(CHUNK_BYTES == 28 * CHUNK_PAGES);
        let chunks = 3 * size_of::<Chunk>();
        let reserve = Reserve::new(2 * chunks + 2 * CHUNK_BYTES);
        let (one, other) = (names(&reserve), names(&reserve));
        scan(&one, 0, &[]);
        assert_eq!(reserve.borrowed_bytes(), 0, "nothing is named yet");
        scan(&one, 0, &[(0, 1)]);
        scan(&one, 256, &[(256, 2)]);
        scan(&one, CHUNK, &[(CHUNK, 2), (CHUNK + 1, 2)]);
        scan(&other, 0, &[(0, 3)]);
        assert_eq!(sent(&other, 0, 3), None, "no memory is left");
        assert_eq!((one.bytes(), other.bytes()), (chunks + 2 * CHUNK_BYTES, chunks));
        // Its domain has no other VM any more.
        one.keep(false);
        scan(&one, 0, &[(0, 1)]);
        scan(&other, 0, &[(0, 3)]);
        assert_eq!((sent(&one, 0, 1), sent(&one, CHUNK, 2)), (None, None));
        assert_eq!(sent(&other, 0, 3), Some(named(3)));
        assert_eq!((one.bytes(), other.bytes()), (chunks, chunks + CHUNK_BYTES));
        drop((one, other));
        assert_eq!(reserve.borrowed_bytes(), 0);
        let small = Reserve::new(chunks - 1);
        let names = names(&small);
        scan(&names, 0, &[(0, 1)]);
        assert_eq!((sent(&names, 0, 1), small.borrowed_bytes()), (None, 0));
    }

    #[test]
    fn without_random_bytes_nothing_is_kept() {
        let reserve = Reserve::new(1 << 20);
        let names = EarlierNames::new(None, PAGES, &reserve);
        names.keep(true);
        scan(&names, 0, &[(0, 1)]);
        assert_eq!((sent(&names, 0, 1), reserve.borrowed_bytes()), (None, 0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, u8),
        Scan,
        Send(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..8_u64, 0..4_u8).prop_map(|(page, byte)| Step::Write(page, byte)),
            1 => Just(Step::Scan),
            4 => (0..8_u64).prop_map(Step::Send),
        ]
    }

    proptest! {
        #[test]
        fn a_page_that_is_sent_never_has_the_name_of_something_else(
            steps in prop::collection::vec(step(), 1..100)
        ) {
            let names = names(&Reserve::new(1 << 20));
            let (mut now, mut scanned) = ([0_u8; 8], [0_u8; 8]);
            for step in steps {
                match step {
                    Step::Write(page, byte) => now[usize::try_from(page).unwrap()] = byte,
                    // Zero pages have no name.
                    Step::Scan => {
                        scanned = now;
                        let pages = (0..).zip(now).filter(|(_, byte)| *byte != 0);
                        scan(&names, 0, &pages.collect::<Vec<_>>());
                    }
                    Step::Send(page) => {
                        let at = usize::try_from(page).unwrap();
                        let is_known = now[at] != 0 && now[at] == scanned[at];
                        let expected = is_known.then(|| named(now[at]));
                        prop_assert_eq!(sent(&names, page, now[at]), expected);
                    }
                }
            }
        }
    }
}
