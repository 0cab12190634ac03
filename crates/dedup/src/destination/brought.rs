//! Content from a provider other than a VM's own source, or from the source of one whose memory
//! can't be read here, and its waiters.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use content::Name;

use super::drained::Drained;
use super::exchange::{Exchange, Page, Waiter};
use super::in_flight::{Passed, Provider};

impl Exchange {
    /// Places content from `by`, one page for each name, for all its waiters. Returns for how
    /// many waiters the content did not have the name that they wait for.
    pub(crate) fn brought<'b>(
        &self,
        by: Provider,
        names: &[Name],
        body: &dyn Fn(usize) -> &'b [u8],
    ) -> usize {
        let mut all_wrong = 0;
        // Waiters that arrived while content was being placed are next.
        loop {
            let waiters = self.waiting_for(by, names);
            if waiters.is_empty() {
                return all_wrong;
            }
            all_wrong += self.place_for(by, names, body, waiters);
        }
    }

    /// The waiters for these names, each with its name's index.
    fn waiting_for(&self, by: Provider, names: &[Name]) -> Vec<(usize, Waiter)> {
        let mut waiters = Vec::new();
        let mut in_flight = self.in_flight.lock();
        for (nth, name) in names.iter().enumerate() {
            let waiting = in_flight.brought(name, by);
            waiters.extend(waiting.into_iter().map(|waiter| (nth, waiter)));
        }
        waiters
    }

    /// Places the content for each waiter. Returns for how many it did not have the right name.
    fn place_for<'b>(
        &self,
        by: Provider,
        names: &[Name],
        body: &dyn Fn(usize) -> &'b [u8],
        waiters: Vec<(usize, Waiter)>,
    ) -> usize {
        let mut pages = Vec::with_capacity(waiters.len());
        for (nth, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => pages.push((names[nth], page)),
                // Remote hosts wait only for content that sources send, and that then is here.
                Waiter::Remote(remote) => remote.not_here(names[nth]),
            }
        }
        let mut drained = Drained::new(self, pages);
        let nth: HashMap<Name, usize> = names.iter().copied().zip(0..).collect();
        let body = |name: &Name| body(nth[name]);
        let mut bytes = Vec::new();
        let (mut held, mut all_wrong) = (HashSet::new(), 0);
        while let Some(group) = drained.group() {
            let is_right =
                |(name, page): &(Name, Page)| page.recipient.key.name(body(name)) == *name;
            let rights: Vec<bool> = group.iter().map(is_right).collect();
            let right = group.iter().zip(&rights).filter(|(_, is_right)| **is_right);
            let right: Vec<&(Name, Page)> = right.map(|(one, _)| one).collect();
            bytes.clear();
            right.iter().for_each(|(name, _)| bytes.extend_from_slice(body(name)));
            let is_placed = self.place_right(by, &right, &bytes);
            if is_placed {
                let held_here = right.iter().filter(|(_, page)| page.recipient.provides());
                held.extend(held_here.map(|(name, _)| *name));
            }
            all_wrong += rights.len() - right.len();
            drained.settle(rights.len(), |nth, name, page| match (rights[nth], is_placed) {
                (true, true) => page.recipient.settled(page.place, false),
                (true, false) => self.have_sent(name, &page),
                (false, _) => self.have_sent_again(name, &page),
            });
        }
        if let Some(rack) = &self.rack {
            rack.holds(held.into_iter().collect());
        }
        all_wrong
    }

    /// Places pages of one VM, one block and one epoch. False if that fails.
    fn place_right(&self, by: Provider, pages: &[&(Name, Page)], bytes: &[u8]) -> bool {
        let Some((_, Page { recipient, place: first })) = pages.first() else { return false };
        let each: Vec<_> = pages.iter().map(|(_, page)| page.place.page).collect();
        let placer = &recipient.placer;
        let placed = placer.place_late(first.block, first.epoch, &each, bytes, by.delivery());
        if placed {
            let named = pages.iter().map(|(name, page)| (page.place.page, *name));
            recipient.holds(first.block, named);
            recipient.brought(by, pages.len());
        }
        placed
    }

    /// `by` does not provide these contents after all. For a disk that counts as no loss: no
    /// other provider sends them.
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
