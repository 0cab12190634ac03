//! Areas of pages whose content is known, and their check.

use core::fmt;
use core::hint::black_box;

use crate::PAGE_WORDS;
use crate::content::{self, Found, Identity, Kind, PageWords};
use crate::plan::Plan;

/// A page aligned to a page of the guest's RAM, so that rewriting it makes one page dirty.
#[derive(Clone)]
#[repr(align(4096))]
pub struct Page(PageWords);

impl Page {
    /// A page of zeros.
    pub const ZERO: Self = Self([0; PAGE_WORDS]);
}

/// Pages of one kind of content, each in a version of its own.
pub struct Area<'m> {
    plan: Plan,
    pages: &'m mut [Page],
    /// Empty if the area is never rewritten: every version is 0.
    versions: &'m mut [u32],
}

/// A page that did not hold what it must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    area: &'static str,
    index: usize,
    address: usize,
    version: u32,
    found: Found,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { area, index, address, version, found } = self;
        write!(f, "{area}-page-{index}-at-{address:#x}-version-{version}-holds-{found}")
    }
}

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that did not hold what they must.
    pub wrong: u64,
    /// The first of them.
    pub first_wrong: Option<Wrong>,
}

impl Checked {
    /// Adds the result of another check.
    pub fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.wrong += other.wrong;
        self.first_wrong = self.first_wrong.or(other.first_wrong);
    }
}

/// The form of a guest's answer.
impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages={} wrong={} first=", self.pages, self.wrong)?;
        match &self.first_wrong {
            Some(first) => first.fmt(f),
            None => f.write_str("none"),
        }
    }
}

impl<'m> Area<'m> {
    /// Fills these pages as an area. `versions` has a number for each page if they are to be
    /// rewritten, and is empty otherwise.
    #[must_use]
    pub fn fill(plan: Plan, pages: &'m mut [Page], versions: &'m mut [u32]) -> Self {
        versions.fill(0);
        let area = Self { plan, pages, versions };
        for index in 0..area.count() {
            let identity = area.identity(index);
            let Page(page) = &mut area.pages[index];
            // The kernel allocates a zero page only when it is written to, and the compiler would
            // drop zeros written over zeros.
            page[0] = 1;
            black_box(&mut *page);
            content::write(plan.kind, identity, page);
        }
        area
    }

    /// Pages in it.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    fn identity(&self, index: usize) -> Identity {
        let version = self.versions.get(index).copied().unwrap_or(0);
        Identity { seed: self.plan.seed, page: self.plan.first_page + index as u64, version }
    }

    /// Describes a page if its content is wrong.
    fn wrong(&self, index: usize) -> Option<Wrong> {
        let (identity, Page(page)) = (self.identity(index), &self.pages[index]);
        content::first_wrong(self.plan.kind, identity, page)?;
        let found = content::explain(self.plan.kind, identity, page);
        let address = page.as_ptr().addr();
        Some(Wrong { area: self.plan.name, index, address, version: identity.version, found })
    }

    /// Checks one page and gives it its next content. A wrong page is reported once and then
    /// corrected, so that one fault is not counted twice.
    ///
    /// Of a page that is rewritten in parts, only the part is checked; the rest is left to later
    /// checks.
    pub fn rewrite(&mut self, index: usize) -> Option<Wrong> {
        if self.plan.kind == Kind::Parts {
            return self.rewrite_part(index);
        }
        let wrong = self.wrong(index);
        let identity = self.identity(index);
        let version = identity.version.wrapping_add(1);
        self.versions[index] = version;
        let Page(page) = &mut self.pages[index];
        content::write(self.plan.kind, Identity { version, ..identity }, page);
        wrong
    }

    fn rewrite_part(&mut self, index: usize) -> Option<Wrong> {
        let identity = self.identity(index);
        let version = identity.version.wrapping_add(1);
        self.versions[index] = version;
        let Page(page) = &mut self.pages[index];
        let word = content::rewrite_part(Identity { version, ..identity }, page)?;
        let found = Found::OtherFrom(word * size_of::<u64>());
        let address = page.as_ptr().addr();
        Some(Wrong { area: self.plan.name, index, address, version: identity.version, found })
    }

    /// Corrupts a page, for the next check to find.
    pub fn spoil(&mut self, index: usize) {
        let Page(page) = &mut self.pages[index];
        page[PAGE_WORDS / 2] ^= 1;
    }

    /// Checks one page.
    #[must_use]
    pub fn check_page(&self, index: usize) -> Checked {
        let wrong = self.wrong(index);
        Checked { pages: 1, wrong: wrong.is_some().into(), first_wrong: wrong }
    }

    /// Checks every page.
    #[must_use]
    pub fn check(&self) -> Checked {
        let mut checked = Checked::default();
        (0..self.count()).for_each(|index| checked.add(self.check_page(index)));
        checked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_BYTES;

    fn working_set<'m>(pages: &'m mut [Page], versions: &'m mut [u32]) -> Area<'m> {
        let (name, kind) = ("ws", Kind::Random);
        let plan = Plan { name, kind, seed: 1, first_page: 100, pages: pages.len() };
        Area::fill(plan, pages, versions)
    }

    #[test]
    fn rewritten_pages_are_right() {
        assert_eq!(size_of::<Page>(), PAGE_BYTES);
        let (mut pages, mut versions) = (vec![Page::ZERO; 8], [0; 8]);
        let mut area = working_set(&mut pages, &mut versions);
        for index in [0, 7, 7, 3] {
            assert_eq!(area.rewrite(index), None);
        }
        let checked = area.check();
        assert_eq!(checked, Checked { pages: 8, wrong: 0, first_wrong: None });
        assert_eq!(checked.to_string(), "pages=8 wrong=0 first=none");
    }

    #[test]
    fn a_lost_write_is_found() {
        let (mut pages, mut versions) = (vec![Page::ZERO; 8], [0; 8]);
        let mut area = working_set(&mut pages, &mut versions);
        let old = area.pages[5].clone();
        area.rewrite(5);
        area.pages[5] = old;
        let checked = area.check();
        assert_eq!(checked.wrong, 1);
        let text = checked.to_string();
        assert!(text.starts_with("pages=8 wrong=1 first=ws-page-5-at-0x"), "{text}");
        assert!(text.ends_with("-version-1-holds-version-0"), "{text}");
        assert!(area.rewrite(5).is_some());
        assert_eq!(area.check().wrong, 0);
    }

    #[test]
    fn a_spoiled_page_is_found() {
        let (mut pages, mut versions) = (vec![Page::ZERO; 8], [0; 8]);
        let mut area = working_set(&mut pages, &mut versions);
        area.spoil(3);
        let text = area.check().to_string();
        assert!(text.starts_with("pages=8 wrong=1 first=ws-page-3-at-0x"), "{text}");
        assert!(text.ends_with("-holds-other-from-byte-2048"), "{text}");
    }

    #[test]
    fn swapped_pages_are_found() {
        let (mut pages, mut versions) = (vec![Page::ZERO; 8], [0; 8]);
        let area = working_set(&mut pages, &mut versions);
        area.pages.swap(1, 2);
        let mut checked = area.check();
        assert_eq!(checked.wrong, 2);
        let first = checked.first_wrong;
        checked.add(area.check_page(2));
        assert_eq!((checked.pages, checked.wrong, checked.first_wrong), (9, 3, first));
    }
}
