//! Waiting pages that have been removed from those in flight, until each is settled.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec::IntoIter;

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

    /// Removes a group of this many pages, in the same order. The caller settles each; those that
    /// it doesn't get to are requested, too.
    pub(super) fn take(&mut self, group: usize) -> impl Iterator<Item = (Name, Page)> {
        let pages = self.pages.split_off(self.pages.len().saturating_sub(group));
        Taken { exchange: self.exchange, pages: pages.into_iter() }
    }
}

/// A group that was removed.
struct Taken<'e> {
    exchange: &'e Exchange,
    pages: IntoIter<(Name, Page)>,
}

impl Iterator for Taken<'_> {
    type Item = (Name, Page);

    fn next(&mut self) -> Option<Self::Item> {
        self.pages.next()
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        request(self.exchange, self.pages.by_ref());
    }
}

impl Drop for Drained<'_> {
    fn drop(&mut self) {
        request(self.exchange, self.pages.drain(..));
    }
}

/// Requests pages from their sources.
fn request(exchange: &Exchange, pages: impl Iterator<Item = (Name, Page)>) {
    for (name, page) in pages {
        // A second panic that left a destructor would end the agent.
        let _ = catch_unwind(AssertUnwindSafe(|| exchange.have_sent(name, &page)));
    }
}
