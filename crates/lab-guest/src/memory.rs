//! The guest's memory, and what checks of anything find.

use guest_pages::memory::{Area, Page};
use guest_pages::plan::Plan;

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

impl From<guest_pages::memory::Checked> for Checked {
    fn from(checked: guest_pages::memory::Checked) -> Self {
        let first_wrong = checked.first_wrong.map(|wrong| wrong.to_string());
        Self { pages: checked.pages, wrong: checked.wrong, first_wrong }
    }
}

/// Memory for the area, filled: the guest keeps it until its end.
#[must_use]
pub fn fill(plan: Plan, rewritten: bool) -> Area<'static> {
    let pages = vec![Page::ZERO; plan.pages].leak();
    let versions = if rewritten { vec![0; plan.pages] } else { Vec::new() };
    Area::fill(plan, pages, versions.leak())
}
