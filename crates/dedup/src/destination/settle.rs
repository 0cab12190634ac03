//! The thread that serves those who wait for content: it copies what has come to
//! where it is wanted, and has the sources of those who waited in vain send it.

use std::sync::Weak;
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use page::BATCH_PAGES;

use super::copies::Copies;
use super::exchange::{Exchange, Page, Waiter};
use super::in_flight::{CLAIM_MAX, Passed, Provider};

/// How often it is looked for those who wait in vain.
const LOOK: Duration = Duration::from_millis(500);

/// Serves until nobody can send any more.
pub(super) fn run(exchange: &Weak<Exchange>, come: &Receiver<Vec<(Name, Waiter)>>) {
    let mut copies = Copies::default();
    let mut looked = Instant::now();
    loop {
        let come = come.recv_timeout(LOOK);
        let Some(exchange) = exchange.upgrade() else { return };
        match come {
            Ok(waiters) => exchange.serve(waiters, &mut copies),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            exchange.pass_on(looked);
            exchange.forget_ended();
        }
    }
}

impl Exchange {
    /// The content that these wait for is here, unless it has changed since.
    fn serve(&self, waiters: Vec<(Name, Waiter)>, copies: &mut Copies) {
        let mut pages = Vec::with_capacity(waiters.len());
        for (name, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => pages.push((name, page)),
                Waiter::Remote(remote) => remote.here(name),
            }
        }
        pages.sort_unstable_by_key(|(_, page)| (page.recipient.number, page.place));
        for group in pages.chunk_by(|(_, one), (_, other)| one.goes_with(other)) {
            for part in group.chunks(BATCH_PAGES) {
                self.serve_one(part, copies);
            }
        }
    }

    /// Pages of one VM, one block and one epoch.
    fn serve_one(&self, waiters: &[(Name, Page)], copies: &mut Copies) {
        let Some((_, Page { recipient, place: first })) = waiters.first() else { return };
        let names: Vec<Name> = waiters.iter().map(|(name, _)| *name).collect();
        let pages = waiters.iter().map(|(_, waiter)| waiter.place.page);
        let here = copies.find(&self.index, &recipient.key, &names, pages);
        // What can't be placed is wanted: the lane that brings it says why.
        let placed = copies.place(&recipient.placer, first.block, first.epoch).is_ok();
        let is_placed = |nth: usize| placed && here >> nth & 1 == 1;
        let missing = waiters.iter().enumerate().filter(|(nth, _)| !is_placed(*nth));
        let asked = missing
            .map(|(_, (name, Page { place, .. }))| (place.block, place.epoch, place.page, *name));
        self.wake_waiters(&recipient.asks(asked));
        for (nth, (_, waiter)) in waiters.iter().enumerate() {
            recipient.settled(waiter.place, !is_placed(nth));
        }
        recipient.waited_in_vain((0..waiters.len()).filter(|nth| !is_placed(*nth)).count());
    }

    /// Has those who wait in vain get it from their own sources.
    fn pass_on(&self, now: Instant) {
        let is_lost = |bringer, since| match bringer {
            Provider::Vm(number) => {
                now.duration_since(since) > CLAIM_MAX || !self.arriving.lock().contains(&number)
            }
            Provider::Disk(number) => !self.arriving.lock().contains(&number),
            Provider::Peer(line) => {
                self.rack.as_ref().is_none_or(|rack| rack.is_lost(line, since, now))
            }
        };
        let passed = self.in_flight.lock().pass_on(now, is_lost, Waiter::standing);
        let Passed { elsewhere, over } = passed;
        drop(over);
        if !elsewhere.is_empty() {
            tracing::debug!(pages = elsewhere.len(), "waited for in vain");
        }
        self.look_elsewhere(elsewhere);
    }
}
