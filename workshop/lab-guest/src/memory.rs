//! The guest's memory, and the results of checks.

use guest_pages::memory::{Area, Page};
use guest_pages::plan::Plan;

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that did not hold what they must.
    pub wrong: u64,
    /// The first of them, and what it held.
    pub first_wrong: Option<String>,
}

impl Checked {
    /// Adds the result of another check.
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

/// Writes so much memory with content that doesn't shrink, then frees it.
pub fn use_and_free(bytes: u64) {
    let mut memory = vec![0u64; usize::try_from(bytes / 8).unwrap_or_default()];
    let mut word = 1u64;
    for place in &mut memory {
        // Knuth's generator: its upper bits are as good as random, for one multiplication.
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *place = word ^ word >> 33;
    }
    std::hint::black_box(&memory);
}

/// Fills memory for the area, which the guest keeps until its end.
#[must_use]
pub fn fill(plan: Plan, rewritten: bool) -> Area<'static> {
    let pages = vec![Page::ZERO; plan.pages].leak();
    let versions = if rewritten { vec![0; plan.pages] } else { Vec::new() };
    Area::fill(plan, pages, versions.leak())
}
