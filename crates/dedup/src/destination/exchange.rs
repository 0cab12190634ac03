//! Where content that is here, or on its way, meets those who need it.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::thread;

use content::{Index, Name};
use crossbeam_channel::{Sender, unbounded};
use parking_lot::Mutex;

use super::in_flight::{InFlight, Provider, Standing};
use super::kept::Kept;
use super::recipient::{Place, Recipient};
use super::settle;
use crate::rack::{Rack, RemoteWaiter};

/// Content of a host's VMs, or of a single one. Dropping it ends its thread.
pub(crate) struct Exchange {
    pub(crate) index: Arc<Index>,
    pub(crate) in_flight: Mutex<InFlight<Waiter>>,
    /// Those that are being moved here, by number.
    pub(super) arriving: Mutex<HashSet<u64>>,
    pub(super) last: AtomicU64,
    /// The same, as long as they are there.
    recipients: Mutex<Vec<Weak<Recipient>>>,
    /// VMs that run here, and whose content stays.
    pub(super) kept: Mutex<Vec<Kept>>,
    come: Sender<Vec<(Name, Waiter)>>,
    /// None: this host stands alone.
    pub(crate) rack: Option<Arc<Rack>>,
}

/// Who waits for content.
pub(crate) enum Waiter {
    /// A page of a VM that comes here.
    Page(Page),
    /// Another host of the rack.
    Remote(Arc<RemoteWaiter>),
}

/// A page that waits for its content.
pub(crate) struct Page {
    pub(crate) recipient: Arc<Recipient>,
    pub(crate) place: Place,
}

impl Page {
    /// Whether both can be placed in one go.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        let of = |page: &Self| (page.recipient.number, page.place.block, page.place.epoch);
        of(self) == of(other)
    }
}

impl Waiter {
    /// What becomes of it if what it waits for doesn't come.
    pub(super) fn standing(&self) -> Standing {
        match self {
            Self::Page(page) if page.recipient.is_over() => Standing::Over,
            Self::Page(page) => Standing::Brings(Provider::Vm(page.recipient.number)),
            Self::Remote(_) => Standing::Leaves,
        }
    }
}

impl Exchange {
    /// For VMs with so many pages in all, in this rack.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn start(pages_max: u64, rack: Option<Arc<Rack>>) -> std::io::Result<Arc<Self>> {
        let (come, in_flight) = unbounded();
        let exchange = Arc::new(Self {
            index: Index::new(pages_max),
            in_flight: Mutex::default(),
            arriving: Mutex::default(),
            last: AtomicU64::new(0),
            recipients: Mutex::default(),
            kept: Mutex::default(),
            come,
            rack,
        });
        let weak = Arc::downgrade(&exchange);
        // It ends by itself when nobody has the exchange any more.
        thread::Builder::new()
            .name("sharing".to_owned())
            .spawn(move || settle::run(&weak, &in_flight))?;
        Ok(exchange)
    }

    /// One more arrives. Those whose names are alike may have something in common: who
    /// names nothing yet begins.
    pub(super) fn met(&self, new: &Arc<Recipient>) {
        let mut recipients = self.recipients.lock();
        // Kept until the lock is free: each may be the last reference by then.
        let all: Vec<Arc<Recipient>> = recipients.iter().filter_map(Weak::upgrade).collect();
        let here = all.iter().filter(|one| !one.is_over());
        *recipients = here.clone().chain([new]).map(Arc::downgrade).collect();
        drop(recipients);
        let mut alike = here.filter(|one| one.key == new.key).peekable();
        if alike.peek().is_some() {
            alike.for_each(|one| one.wake());
            new.wake();
        }
    }

    /// The source of its VM sends the page after all, which it was waited for in
    /// vain.
    pub(super) fn have_sent_again(&self, name: Name, page: &Page) {
        page.recipient.waited_in_vain(1);
        self.have_sent(name, page);
    }

    /// The source of its VM sends the page.
    pub(super) fn have_sent(&self, name: Name, Page { recipient, place }: &Page) {
        let Place { block, epoch, page, .. } = *place;
        self.wake_waiters(&recipient.asks(std::iter::once((block, epoch, page, name))));
        recipient.settled(*place, true);
    }

    /// What these wait for doesn't come from where it was to.
    pub(super) fn look_elsewhere(&self, waiters: Vec<(Name, Waiter)>) {
        for (name, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => self.have_sent_again(name, &page),
                Waiter::Remote(remote) => remote.not_here(name),
            }
        }
    }

    /// Contents have come, or will not come from where they were to: whoever waits
    /// for them looks, and has them from his own source if they are not here.
    pub(crate) fn wake_waiters(&self, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        let mut served = Vec::new();
        let mut in_flight = self.in_flight.lock();
        for name in names {
            served.extend(in_flight.came(name).into_iter().map(|waiter| (*name, waiter)));
        }
        drop(in_flight);
        if !served.is_empty() {
            // Its thread lives as long as the exchange.
            let _ = self.come.send(served);
        }
    }
}
