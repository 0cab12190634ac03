//! A domain's memory, in which every page follows from its number and from how often it was
//! written. These numbers are in the memory too, so they move with it.

use std::fs;
use std::io;
use std::path::Path;

use lab_guest::content::{self as guests, Identity, Kind};
use lab_guest::random::Random;
use page::{BlockId, PAGE_BYTES, PageIndex};
use xen::{DomainKind, PageKind, PageWord};

const VERSION_BYTES: usize = 4;
const VERSIONS_PER_PAGE: u32 = 1024;
const _: () = assert!(VERSIONS_PER_PAGE as usize * VERSION_BYTES == PAGE_BYTES);
/// In the file of types: a page that no stream had.
const MISSING: u8 = 0xff;
const MEMORY: &str = "memory";
const KINDS: &str = "kinds";

/// The memory of one domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// None for a page that did not arrive.
    kinds: Vec<Option<PageKind>>,
    bytes: Vec<u8>,
}

/// How many pages hold the versions of all pages.
fn table_pages(pages: u32) -> u32 {
    pages.div_ceil(VERSIONS_PER_PAGE)
}

/// The type of a page. One in thirty is of another type than most.
fn kind_of(domain: DomainKind, pages: u32, page: u32) -> PageKind {
    match (domain, page % 61) {
        _ if page < table_pages(pages) => PageKind::Normal,
        (_, 60) => PageKind::Invalid,
        (DomainKind::Pv, 7) => PageKind::L1,
        (DomainKind::Pv, 8) => PageKind::L4Pinned,
        (DomainKind::Hvm, 7) => PageKind::AllocateOnly,
        _ => PageKind::Normal,
    }
}

/// Whether guests of the lab have this page too.
fn is_common(page: u32, version: u32) -> bool {
    version == 0 && page % 4 >= 2
}

/// What a page holds. Of four that were never written again one is zero, and two are those of
/// guests; one of four shrinks.
fn content(page: u32, version: u32) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if is_common(page, version) {
        let identity = Identity { seed: Memory::COMMON_SEED, page: page.into(), version };
        let mut words = [0; lab_guest::PAGE_WORDS];
        guests::write(Kind::Steps, identity, &mut words);
        for (bytes, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        return bytes;
    }
    let random_bytes = match page % 4 {
        0 if version == 0 => 0,
        1 => PAGE_BYTES / 8,
        _ => PAGE_BYTES,
    };
    Random::new(page.into(), version.into()).fill(&mut bytes[..random_bytes]);
    bytes
}

impl Memory {
    /// The seed of guests whose random content, from its first page on, a new domain has in part.
    pub const COMMON_SEED: u64 = 5;

    /// Bytes of data in a new domain that such a guest has too.
    #[must_use]
    pub fn common_bytes(domain: DomainKind, pages: u32) -> u64 {
        let is_data = |page: &u32| kind_of(domain, pages, *page) == PageKind::Normal;
        let own = table_pages(pages)..pages;
        let common = own.filter(is_data).filter(|page| is_common(*page, 0));
        (common.count() * PAGE_BYTES) as u64
    }

    /// Memory of which no page is there.
    #[must_use]
    pub fn empty(pages: u32) -> Self {
        let count = pages as usize;
        Self { kinds: vec![None; count], bytes: vec![0; count * PAGE_BYTES] }
    }

    /// The memory of a new domain.
    #[must_use]
    pub fn filled(domain: DomainKind, pages: u32) -> Self {
        let mut memory = Self::empty(pages);
        for page in 0..pages {
            let kind = kind_of(domain, pages, page);
            memory.kinds[page as usize] = Some(kind);
            if page >= table_pages(pages) && kind.has_body() {
                memory.page_mut(page).copy_from_slice(&content(page, 0));
            }
        }
        memory
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        u32::try_from(self.kinds.len()).expect("page numbers have 32 bits")
    }

    pub(super) fn page(&self, page: u32) -> &[u8] {
        let start = page as usize * PAGE_BYTES;
        &self.bytes[start..start + PAGE_BYTES]
    }

    fn page_mut(&mut self, page: u32) -> &mut [u8] {
        let start = page as usize * PAGE_BYTES;
        &mut self.bytes[start..start + PAGE_BYTES]
    }

    /// The page as streams name it.
    pub(super) fn word(&self, page: u32) -> PageWord {
        let kind = self.kinds[page as usize].unwrap_or(PageKind::Invalid);
        PageWord { page: PageIndex(page), kind }
    }

    /// Takes a page of a stream.
    pub(super) fn put(&mut self, page: u32, kind: PageKind, body: &[u8]) {
        self.kinds[page as usize] = Some(kind);
        let bytes = self.page_mut(page);
        bytes.fill(0);
        bytes[..body.len()].copy_from_slice(body);
    }

    fn version(&self, page: u32) -> u32 {
        let at = page as usize * VERSION_BYTES;
        let bytes = self.bytes[at..at + VERSION_BYTES].try_into();
        u32::from_le_bytes(bytes.expect("as many bytes as were taken"))
    }

    /// Writes some page, as the domain does; returns the pages that changed, with the one that
    /// holds its version.
    pub(super) fn write(&mut self, random: &mut Random) -> [u32; 2] {
        let table = table_pages(self.pages());
        let page = loop {
            let drawn = u32::try_from(random.below(self.kinds.len())).unwrap_or(0);
            if drawn >= table && self.kinds[drawn as usize].is_some_and(PageKind::has_body) {
                break drawn;
            }
        };
        let version = self.version(page) + 1;
        let at = page as usize * VERSION_BYTES;
        self.bytes[at..at + VERSION_BYTES].copy_from_slice(&version.to_le_bytes());
        self.page_mut(page).copy_from_slice(&content(page, version));
        [page / VERSIONS_PER_PAGE, page]
    }

    /// The pages that are not as the domain wrote them.
    #[must_use]
    pub fn wrong(&self, domain: DomainKind) -> Vec<u32> {
        let pages = self.pages();
        let is_right = |page: u32| {
            let kind = kind_of(domain, pages, page);
            let has_content = page < table_pages(pages)
                || !kind.has_body()
                || self.page(page) == &content(page, self.version(page))[..];
            self.kinds[page as usize] == Some(kind) && has_content
        };
        (0..pages).filter(|page| !is_right(*page)).collect()
    }

    pub(super) fn save(&self, dir: &Path) -> io::Result<()> {
        let kinds = self.kinds.iter().map(|kind| kind.map_or(MISSING, |kind| kind as u8));
        fs::write(dir.join(KINDS), kinds.collect::<Vec<u8>>())?;
        fs::write(dir.join(MEMORY), &self.bytes)
    }

    pub(super) fn load(dir: &Path) -> io::Result<Self> {
        let kinds = fs::read(dir.join(KINDS))?.into_iter();
        let kinds = kinds.map(|kind| PageKind::of_block(BlockId(kind.into()))).collect();
        Ok(Self { kinds, bytes: fs::read(dir.join(MEMORY))? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_old_missing_or_of_another_type_is_wrong() {
        for domain in [DomainKind::Pv, DomainKind::Hvm] {
            let mut memory = Memory::filled(domain, 2100);
            assert_eq!(memory.wrong(domain), [0; 0]);
            let old = memory.clone();
            let [table, page] = memory.write(&mut Random::new(1, 2));
            assert_eq!((memory.wrong(domain), table), (vec![], page / 1024));
            let mut stale = memory.clone();
            stale.put(page, old.word(page).kind, old.page(page));
            assert_eq!(stale.wrong(domain), [page]);
            let mut missing = memory.clone();
            missing.kinds[60] = None;
            missing.kinds[7] = Some(PageKind::L2);
            assert_eq!(missing.wrong(domain), [7, 60]);
            let dir = tempfile::tempdir().unwrap();
            missing.save(dir.path()).unwrap();
            assert_eq!(Memory::load(dir.path()).unwrap(), missing);
        }
    }
}
