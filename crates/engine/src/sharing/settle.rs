//! The thread that serves those who wait for content: it copies what has come to
//! where it is wanted, and has the sources of those who waited in vain send it.

use std::sync::Weak;
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use page::BATCH_PAGES;

use super::coming::Bringer;
use super::copies::Copies;
use super::taker::Place;
use super::{Sharing, Waiter};

/// How often it is looked for those who wait in vain.
const LOOK: Duration = Duration::from_millis(500);

/// Serves until nobody can send any more.
pub(super) fn run(sharing: &Weak<Sharing>, come: &Receiver<Vec<(Name, Waiter)>>) {
    let mut copies = Copies::default();
    let mut looked = Instant::now();
    loop {
        let come = come.recv_timeout(LOOK);
        let Some(sharing) = sharing.upgrade() else { return };
        match come {
            Ok(waiters) => sharing.serve(waiters, &mut copies),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            sharing.pass_on(looked);
            sharing.forget_ended();
        }
    }
}

impl Sharing {
    /// The content that these wait for is here, unless it has changed since.
    fn serve(&self, mut waiters: Vec<(Name, Waiter)>, copies: &mut Copies) {
        waiters.sort_unstable_by_key(|(_, waiter)| (waiter.taker.number, waiter.place));
        let together = |(_, a): &(Name, Waiter), (_, b): &(Name, Waiter)| {
            a.taker.number == b.taker.number
                && (a.place.block, a.place.epoch) == (b.place.block, b.place.epoch)
        };
        for group in waiters.chunk_by(together) {
            for part in group.chunks(BATCH_PAGES) {
                self.serve_one(part, copies);
            }
        }
    }

    /// Pages of one VM, one block and one epoch.
    fn serve_one(&self, waiters: &[(Name, Waiter)], copies: &mut Copies) {
        let Some((_, Waiter { taker, place: first })) = waiters.first() else { return };
        let names: Vec<Name> = waiters.iter().map(|(name, _)| *name).collect();
        let pages = waiters.iter().map(|(_, waiter)| waiter.place.page);
        let here = copies.find(&self.index, &taker.key, &names, pages);
        // What can't be placed is wanted: the lane that brings it says why.
        let placed = copies.place(&taker.placer, first.block, first.epoch).is_ok();
        let is_placed = |nth: usize| placed && here >> nth & 1 == 1;
        let missing = waiters.iter().enumerate().filter(|(nth, _)| !is_placed(*nth));
        let asked = missing
            .map(|(_, (name, Waiter { place, .. }))| (place.block, place.epoch, place.page, *name));
        self.over(&taker.asks(asked));
        for (nth, (_, waiter)) in waiters.iter().enumerate() {
            taker.settled(waiter.place, !is_placed(nth));
        }
    }

    /// Has those who wait in vain get it from their own sources.
    fn pass_on(&self, now: Instant) {
        let gone = |Bringer(number)| !self.arriving.lock().contains(&number);
        let can =
            |waiter: &Waiter| (!waiter.taker.is_over()).then_some(Bringer(waiter.taker.number));
        let passed = self.coming.lock().pass_on(now, gone, can);
        if !passed.is_empty() {
            tracing::debug!(pages = passed.len(), "waited for in vain");
        }
        for (name, Waiter { taker, place }) in passed {
            let Place { block, epoch, page, .. } = place;
            self.over(&taker.asks(std::iter::once((block, epoch, page, name))));
            taker.settled(place, true);
        }
    }
}
