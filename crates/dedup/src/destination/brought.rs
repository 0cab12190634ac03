//! Content that was brought by somebody else than a VM's source, and what becomes of
//! those who wait for it.

use std::collections::HashSet;
use std::time::Instant;

use content::Name;
use page::BATCH_PAGES;

use super::exchange::{Exchange, Page, Waiter};
use super::in_flight::{Passed, Provider};

impl Exchange {
    /// Content has come: one page for each name. Says how many were not what those
    /// who wait for them want.
    pub(crate) fn brought<'b>(
        &self,
        by: Provider,
        names: &[Name],
        body: &dyn Fn(usize) -> &'b [u8],
    ) -> usize {
        let mut all_wrong = 0;
        // Those who came to need it while it was being placed are next.
        loop {
            let waiters = self.waiting_for(by, names);
            if waiters.is_empty() {
                return all_wrong;
            }
            all_wrong += self.place_for(by, names, body, waiters);
        }
    }

    /// Who waits for these, each with which of them it is.
    fn waiting_for(&self, by: Provider, names: &[Name]) -> Vec<(usize, Waiter)> {
        let mut waiters = Vec::new();
        let mut in_flight = self.in_flight.lock();
        for (nth, name) in names.iter().enumerate() {
            let waiting = in_flight.brought(name, by);
            waiters.extend(waiting.into_iter().map(|waiter| (nth, waiter)));
        }
        waiters
    }

    /// Places what was brought for each who waits. Says how many of it was not what
    /// they want.
    fn place_for<'b>(
        &self,
        by: Provider,
        names: &[Name],
        body: &dyn Fn(usize) -> &'b [u8],
        waiters: Vec<(usize, Waiter)>,
    ) -> usize {
        let mut pages = Vec::new();
        for (nth, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => pages.push((nth, page)),
                // Those who ask from afar wait only for what sources bring.
                Waiter::Remote(remote) => remote.not_here(names[nth]),
            }
        }
        pages.sort_unstable_by_key(|(_, page)| (page.recipient.number, page.place));
        let together = |(_, a): &(usize, Page), (_, b): &(usize, Page)| a.goes_with(b);
        let mut bytes = Vec::new();
        let (mut held, mut all_wrong) = (HashSet::new(), 0);
        for group in pages.chunk_by(together).flat_map(|group| group.chunks(BATCH_PAGES)) {
            bytes.clear();
            let right =
                |(nth, page): &&(usize, Page)| page.recipient.key.name(body(*nth)) == names[*nth];
            let (right, wrong): (Vec<_>, Vec<_>) = group.iter().partition(right);
            for (nth, _) in &right {
                bytes.extend_from_slice(body(*nth));
            }
            all_wrong += wrong.len();
            let each = right.iter().map(|(nth, page)| (names[*nth], page));
            if self.place_brought(by, &each.collect::<Vec<_>>(), &bytes) {
                held.extend(right.iter().map(|(nth, _)| names[*nth]));
            }
            wrong.iter().for_each(|(nth, page)| self.have_sent_again(names[*nth], page));
        }
        if let Some(rack) = &self.rack {
            rack.holds(held.into_iter().collect());
        }
        all_wrong
    }

    /// Places content of one VM, one block and one epoch. Whether it could.
    fn place_brought(&self, by: Provider, pages: &[(Name, &Page)], bytes: &[u8]) -> bool {
        let Some((_, Page { recipient, place: first })) = pages.first() else { return false };
        let each: Vec<_> = pages.iter().map(|(_, page)| page.place.page).collect();
        let placer = &recipient.placer;
        let placed = placer.place_bodies(first.block, first.epoch, &each, bytes, by.delivery());
        let placed = placed.is_ok();
        if placed {
            let named = pages.iter().map(|(name, page)| (page.place.page, *name));
            recipient.holds(first.block, named);
            recipient.brought(by, pages.len());
        }
        for (name, page) in pages {
            if placed {
                recipient.settled(page.place, false);
            } else {
                self.have_sent(*name, page);
            }
        }
        placed
    }

    /// This one does not bring these, whatever was thought. From a disk that is no
    /// loss: nobody else brings them.
    pub(crate) fn not_brought(&self, by: Provider, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        let passed = self.in_flight.lock().fails(names, by, Instant::now(), Waiter::standing);
        let Passed { elsewhere, over } = passed;
        drop(over);
        if let Provider::Disk(_) = by {
            for (name, waiter) in &elsewhere {
                match waiter {
                    Waiter::Page(page) => self.have_sent(*name, page),
                    Waiter::Remote(remote) => remote.not_here(*name),
                }
            }
        } else {
            self.look_elsewhere(elsewhere);
        }
    }
}
