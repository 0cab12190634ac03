//! Matches content that is here, or in flight, with its waiters.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use content::{Index, Key, Member, Name};
use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use qemu::process::Process;

use super::blocks::Blocks;
use super::in_flight::{InFlight, Provider, Repeats, Standing};
use super::recipient::{AwaitedPage, Recipient};
use crate::rack::{Rack, RemoteWaiter};

/// The content of a host's VMs, or of a single VM. Dropping it ends its thread.
pub(crate) struct Exchange {
    pub(crate) index: Arc<Index>,
    pub(crate) in_flight: Mutex<InFlight<Waiter>>,
    /// The numbers of the VMs that arrive.
    pub(crate) arriving: Mutex<HashSet<u64>>,
    pub(super) last: AtomicU64,
    /// The same VMs, as long as they exist.
    recipients: Mutex<Vec<Weak<Recipient>>>,
    /// VMs that run here and provide content.
    pub(super) kept: Mutex<Vec<Kept>>,
    come: Sender<Vec<(Name, Waiter)>>,
    /// None if this host is in no rack.
    pub(crate) rack: Option<Arc<Rack>>,
    /// It is for one VM, so its threads hold up no other.
    pub(super) is_of_one: bool,
}

/// A VM that runs here and provides content.
pub(super) struct Kept {
    pub(super) process: Process,
    pub(super) key: Key,
    pub(super) member: Arc<Member>,
    pub(super) blocks: Arc<Blocks>,
}

impl Kept {
    pub(super) fn is_of(&self, pid: u32) -> bool {
        self.process.pid() == pid
    }
}

/// A waiter for content.
pub(crate) enum Waiter {
    /// A page of a VM that arrives here.
    Page(Page),
    /// Another host of the rack.
    Remote(Arc<RemoteWaiter>),
}

/// A page that waits for its content.
pub(crate) struct Page {
    pub(crate) recipient: Arc<Recipient>,
    pub(crate) place: AwaitedPage,
}

impl Page {
    /// Whether both pages can be placed in one call.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        let of = |page: &Self| (page.recipient.number, page.place.block, page.place.epoch);
        of(self) == of(other)
    }
}

impl Waiter {
    /// What happens to the waiter if its content does not arrive.
    pub(super) fn standing(&self) -> Standing {
        match self {
            Self::Page(page) if page.recipient.is_over() => Standing::Over,
            Self::Page(page) => Standing::Brings(Provider::Vm(page.recipient.number)),
            Self::Remote(remote) if remote.is_over() => Standing::Over,
            Self::Remote(_) => Standing::Leaves,
        }
    }
}

impl Repeats for Waiter {
    fn repeats(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Page(one), Self::Page(other)) => {
                one.goes_with(other) && one.place.page == other.place.page
            }
            _ => false,
        }
    }
}

impl Exchange {
    /// One for VMs with up to `pages_max` pages in all, with what its thread is to serve. The thread
    /// is the caller's to start.
    pub(super) fn new(
        pages_max: u64,
        rack: Option<Arc<Rack>>,
        is_of_one: bool,
    ) -> (Self, Receiver<Vec<(Name, Waiter)>>) {
        let (come, served) = unbounded();
        let exchange = Self {
            index: Index::new(pages_max),
            in_flight: Mutex::default(),
            arriving: Mutex::default(),
            last: AtomicU64::new(0),
            recipients: Mutex::default(),
            kept: Mutex::default(),
            come,
            rack,
            is_of_one,
        };
        (exchange, served)
    }

    /// Registers a VM that arrives. VMs with the same key may have content in common, so those
    /// whose sources name no pages yet are woken.
    pub(super) fn met(&self, new: &Arc<Recipient>) {
        let mut recipients = self.recipients.lock();
        // Kept until the lock is released, because each may be the last reference by then.
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

    /// Whether a VM arrives whose pages are named with this key.
    pub(super) fn receives(&self, key: &Key) -> bool {
        // Each may be the last reference by then, and is dropped without the lock.
        let all: Vec<Arc<Recipient>> =
            self.recipients.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().any(|one| !one.is_over() && one.key == *key)
    }

    /// Requests a page, which was awaited in vain, from its VM's source.
    pub(super) fn have_sent_again(&self, name: Name, page: &Page) {
        page.recipient.waited_in_vain(1);
        self.have_sent(name, page);
    }

    /// Requests a page from its VM's source.
    pub(super) fn have_sent(&self, name: Name, Page { recipient, place }: &Page) {
        let AwaitedPage { block, epoch, page, .. } = *place;
        self.wake_waiters(&recipient.asks(std::iter::once((block, epoch, page, name))));
        recipient.settled(*place, true);
    }

    /// The content does not come from the expected provider. Pages are requested from their
    /// sources, and remote hosts are notified.
    pub(super) fn look_elsewhere(&self, waiters: Vec<(Name, Waiter)>) {
        for (name, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => self.have_sent_again(name, &page),
                Waiter::Remote(remote) => remote.not_here(name),
            }
        }
    }

    /// Content has arrived, or won't come from the expected provider. The thread copies what is
    /// here for its waiters, and requests the rest from their sources.
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

    /// Drops VMs that have left or ended.
    pub(super) fn forget_ended(&self) {
        let mut kept = self.kept.lock();
        let ended: Vec<Kept> = kept.extract_if(.., |kept| !kept.process.is_alive()).collect();
        drop(kept);
        drop(ended);
    }
}
