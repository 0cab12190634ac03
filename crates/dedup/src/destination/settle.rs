//! The thread that serves waiters: it copies content that has arrived, and requests what was
//! awaited in vain from the sources.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use page::PageSet;

use super::copies::Copies;
use super::drained::Drained;
use super::exchange::{Exchange, Page, Waiter};
use super::in_flight::{CLAIM_MAX, Passed, Provider};
use crate::rack::Rack;

/// How often it checks for waiters whose content does not arrive.
const CHECK_EVERY: Duration = Duration::from_millis(500);

impl Exchange {
    /// Starts an exchange for VMs with up to `pages_max` pages in all, in this rack.
    pub(crate) fn start(pages_max: u64, rack: Option<Arc<Rack>>) -> std::io::Result<Arc<Self>> {
        served(Self::new(pages_max, rack, false))
    }

    /// Starts an exchange for one VM with this many pages, which shares nothing.
    pub(crate) fn start_for_one(pages: u64) -> std::io::Result<Arc<Self>> {
        served(Self::new(pages, None, true))
    }
}

type Served = Receiver<Vec<(Name, Waiter)>>;

/// Starts the thread of an exchange, which ends once the exchange is dropped.
fn served((exchange, come): (Exchange, Served)) -> std::io::Result<Arc<Exchange>> {
    let exchange = Arc::new(exchange);
    let weak = Arc::downgrade(&exchange);
    thread::Builder::new().name("sharing".to_owned()).spawn(move || run(&weak, &come))?;
    Ok(exchange)
}

/// Serves until the exchange is dropped.
fn run(exchange: &Weak<Exchange>, come: &Served) {
    let mut copies = Copies::default();
    let mut checked = Instant::now();
    loop {
        let come = come.recv_timeout(CHECK_EVERY);
        let Some(exchange) = exchange.upgrade() else { return };
        let waiters = match come {
            Ok(waiters) => waiters,
            Err(RecvTimeoutError::Timeout) => {
                // This thread outlives all guests: nothing of the last one stays.
                copies = Copies::default();
                Vec::new()
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let is_due = checked.elapsed() >= CHECK_EVERY;
        if is_due {
            checked = Instant::now();
        }
        // All arriving VMs need this thread, so it survives a panic. The pages in question are
        // requested from their sources.
        let turn = catch_unwind(AssertUnwindSafe(|| {
            exchange.serve(waiters, &mut copies);
            if is_due {
                exchange.pass_on(checked);
                exchange.forget_ended();
            }
        }));
        if turn.is_err() {
            tracing::error!("content that is here could not be placed: a fault in the agent");
        }
    }
}

impl Exchange {
    /// Serves waiters whose content is here, unless it has changed since.
    fn serve(&self, waiters: Vec<(Name, Waiter)>, copies: &mut Copies) {
        let mut pages = Vec::with_capacity(waiters.len());
        for (name, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => pages.push((name, page)),
                Waiter::Remote(remote) => remote.here(name),
            }
        }
        let mut drained = Drained::new(self, pages);
        while let Some(group) = drained.group() {
            let (placed, pages) = (self.place_copies(group, copies), group.len());
            drained.settle(pages, |nth, _, page| {
                page.recipient.settled(page.place, !placed.has(nth));
            });
        }
    }

    /// Places pages of one VM, one block and one epoch, and requests those that can't be placed
    /// from its source. Returns which are placed.
    fn place_copies(&self, group: &[(Name, Page)], copies: &mut Copies) -> PageSet {
        let Some((_, Page { recipient, place: first })) = group.first() else {
            return PageSet::NONE;
        };
        let names: Vec<Name> = group.iter().map(|(name, _)| *name).collect();
        let pages = group.iter().map(|(_, page)| page.place.page);
        let here = copies.find(&self.index, &recipient.key, &names, pages);
        // A page that can't be placed is requested: the lane that brings it reports the error.
        let is_placed = copies.place_late(&*recipient.placer, first.block, first.epoch);
        let placed = if is_placed { here } else { PageSet::NONE };
        let missing = PageSet::all(group.len()).without(placed);
        let requested = missing
            .of(group)
            .map(|(name, Page { place, .. })| (place.block, place.epoch, place.page, *name));
        self.wake_waiters(&recipient.asks(requested));
        recipient.waited_in_vain(missing.len());
        placed
    }

    /// Has waiters get content that does not arrive from their own sources.
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
            tracing::debug!(pages = elsewhere.len(), "content did not arrive in time");
        }
        self.look_elsewhere(elsewhere);
    }
}
