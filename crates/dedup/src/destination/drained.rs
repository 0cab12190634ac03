//! Waiting pages that have been removed from those in flight, until each is settled.

use std::panic::{AssertUnwindSafe, catch_unwind};

use content::Name;
use page::BATCH_PAGES;

use super::exchange::{Exchange, Page};

/// Waiting pages, each with the name of its content. Nothing else refers to them any more. So
/// if this is dropped with pages left, as when its thread panics, these are requested from
/// their sources.
pub(super) struct Drained<'e> {
    exchange: &'e Exchange,
    /// Sorted so that pages that can be placed together are adjacent.
    pages: Vec<(Name, Page)>,
}

impl<'e> Drained<'e> {
    pub(super) fn new(exchange: &'e Exchange, mut pages: Vec<(Name, Page)>) -> Self {
        pages.sort_unstable_by_key(|(_, page)| (page.recipient.number, page.place));
        Self { exchange, pages }
    }

    /// The next pages of one VM, one block and one epoch, at most a batch of them. None once
    /// all are taken.
    pub(super) fn group(&self) -> Option<&[(Name, Page)]> {
        let (_, last) = self.pages.last()?;
        let fit = self.pages.iter().rev().take(BATCH_PAGES);
        let together = fit.take_while(|(_, page)| page.goes_with(last)).count();
        self.pages.get(self.pages.len() - together..)
    }

    /// Removes a group of this many pages, the last one first. `each` settles a page, whose index
    /// in the group it gets; those that it doesn't get to stay here.
    pub(super) fn settle(&mut self, group: usize, mut each: impl FnMut(usize, Name, Page)) {
        for nth in (0..group).rev() {
            if let Some((name, page)) = self.pages.pop() {
                each(nth, name, page);
            }
        }
    }
}

impl Drop for Drained<'_> {
    fn drop(&mut self) {
        for (name, page) in self.pages.drain(..) {
            // A second panic that left a destructor would end the agent.
            let _ = catch_unwind(AssertUnwindSafe(|| self.exchange.have_sent(name, &page)));
        }
    }
}
