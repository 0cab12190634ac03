//! Areas of pages whose content is known, and the check of them.

use std::hint::black_box;

use crate::content::{self, Identity, Kind, PageWords};
use crate::{PAGE_BYTES, PAGE_WORDS};

/// A page that is one page of the guest's RAM, not parts of two: rewriting it
/// makes one page dirty.
#[derive(Clone)]
#[repr(align(4096))]
struct Aligned(PageWords);

/// Pages of one kind of content, each in a version of its own.
pub struct Area {
    name: &'static str,
    kind: Kind,
    seed: u64,
    first_page: u64,
    pages: Vec<Aligned>,
    /// Empty where nothing is rewritten: every version is 0.
    versions: Vec<u32>,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that did not hold what they must.
    pub wrong: u64,
    /// Which one was the first, and what it held.
    pub first_wrong: Option<String>,
}

impl Checked {
    /// Takes in what another check found.
    pub fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.wrong += other.wrong;
        if self.first_wrong.is_none() {
            self.first_wrong = other.first_wrong;
        }
    }
}

impl Area {
    /// An area of `bytes`, filled. `first_page` is the number of its first
    /// page, unique in this guest.
    #[must_use]
    pub fn fill(
        name: &'static str,
        kind: Kind,
        seed: u64,
        first_page: u64,
        bytes: u64,
        rewritten: bool,
    ) -> Self {
        let count = usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        let mut pages = vec![Aligned([0; PAGE_WORDS]); count];
        let versions = if rewritten { vec![0; count] } else { Vec::new() };
        for (index, Aligned(page)) in pages.iter_mut().enumerate() {
            // The kernel gives zero pages only when they are written to, and
            // the compiler would leave out zeros written over zeros.
            page[0] = 1;
            black_box(&mut *page);
            let identity = Identity { seed, page: first_page + index as u64, version: 0 };
            content::write(kind, identity, page);
        }
        Self { name, kind, seed, first_page, pages, versions }
    }

    /// Pages in it.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    fn identity(&self, index: usize) -> Identity {
        let version = self.versions.get(index).copied().unwrap_or(0);
        Identity { seed: self.seed, page: self.first_page + index as u64, version }
    }

    /// Checks one page and gives it its next content. A wrong page is told of
    /// once and then made right, so that one fault is not counted again.
    pub fn rewrite(&mut self, index: usize) -> Option<String> {
        let identity = self.identity(index);
        let Aligned(page) = &mut self.pages[index];
        let wrong = content::first_wrong(self.kind, identity, page)
            .map(|_| describe(self.name, self.kind, identity, index, page));
        let version = identity.version.wrapping_add(1);
        self.versions[index] = version;
        content::write(self.kind, Identity { version, ..identity }, page);
        wrong
    }

    /// Checks every page.
    #[must_use]
    pub fn check(&self) -> Checked {
        let mut checked = Checked::default();
        for (index, Aligned(page)) in self.pages.iter().enumerate() {
            checked.pages += 1;
            let identity = self.identity(index);
            if content::first_wrong(self.kind, identity, page).is_none() {
                continue;
            }
            checked.wrong += 1;
            if checked.first_wrong.is_none() {
                let text = describe(self.name, self.kind, identity, index, page);
                checked.first_wrong = Some(text);
            }
        }
        checked
    }
}

fn describe(area: &str, kind: Kind, identity: Identity, index: usize, page: &PageWords) -> String {
    let found = content::explain(kind, identity, page);
    let address = page.as_ptr().addr();
    let version = identity.version;
    format!("{area}-page-{index}-at-{address:#x}-version-{version}-holds-{found}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn working_set() -> Area {
        Area::fill("ws", Kind::Random, 1, 100, 8 * PAGE_BYTES as u64, true)
    }

    #[test]
    fn rewritten_pages_are_right() {
        let mut area = working_set();
        for index in [0, 7, 7, 3] {
            assert_eq!(area.rewrite(index), None);
        }
        assert_eq!(area.check(), Checked { pages: 8, wrong: 0, first_wrong: None });
    }

    #[test]
    fn a_lost_write_is_found() {
        let mut area = working_set();
        let old = area.pages[5].clone();
        area.rewrite(5);
        area.pages[5] = old;
        let checked = area.check();
        assert_eq!(checked.wrong, 1);
        let text = checked.first_wrong.expect("a description");
        assert!(text.contains("ws-page-5") && text.ends_with("holds-version-0"), "{text}");
        assert!(area.rewrite(5).is_some());
        assert_eq!(area.check().wrong, 0);
    }

    #[test]
    fn swapped_pages_are_found() {
        let mut area = working_set();
        area.pages.swap(1, 2);
        assert_eq!(area.check().wrong, 2);
    }
}
