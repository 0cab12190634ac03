//! Content that need not be sent: pages that come by name, and are found on this
//! host.
//!
//! A source names the pages of QEMU's first pass. What this host has is copied
//! from the RAM of the VM that has it, named once more, and placed only if the name
//! is the same. What is on its way here already, for another VM or another page, is
//! waited for. Else, if the VM may have content of the rack, its directory is asked,
//! and what another host has or gets comes from there. All else is asked of the
//! source. A name that nobody has, a copy that has changed, a VM that never comes, a
//! host that is gone cost time, not content.

mod blocks;
mod brought;
mod copies;
mod in_flight;
mod kept;
mod outbox;
mod recipient;
mod resolve;
mod settle;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use content::{Domain, Index, Key, Name, Scanner};
use crossbeam_channel::{Sender, unbounded};
use page::PAGE_BYTES;
use parking_lot::Mutex;

pub use blocks::Blocks;
use in_flight::Standing;
pub(crate) use in_flight::{CLAIM_MAX, InFlight, Provider};
use kept::Kept;
pub use kept::{Known, WatchError};
pub use outbox::Outbox;
pub(crate) use recipient::{Place, Recipient};
pub use resolve::Resolving;

use crate::rack::{Rack, RemoteWaiter};

/// What an agent shares among the VMs that come to its host. Dropping it ends its
/// thread.
pub struct Sharing {
    secret: Vec<u8>,
    pub(crate) index: Arc<Index>,
    pub(crate) in_flight: Mutex<InFlight<Waiter>>,
    /// Those that are being moved here, by number.
    arriving: Mutex<HashSet<u64>>,
    last: AtomicU64,
    /// VMs of this host.
    kept: Mutex<Vec<Kept>>,
    scanner: Mutex<Option<Scanner>>,
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
    fn goes_with(&self, other: &Self) -> bool {
        let of = |page: &Self| (page.recipient.number, page.place.block, page.place.epoch);
        of(self) == of(other)
    }
}

impl Waiter {
    /// What becomes of it if what it waits for doesn't come.
    fn standing(&self) -> Standing {
        match self {
            Self::Page(page) if page.recipient.is_over() => Standing::Over,
            Self::Page(page) => Standing::Brings(Provider::Vm(page.recipient.number)),
            Self::Remote(_) => Standing::Leaves,
        }
    }
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sharing").finish_non_exhaustive()
    }
}

impl Sharing {
    /// For this host, in a cluster with this secret, and in this rack.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(secret: Vec<u8>, rack: Option<Arc<Rack>>) -> std::io::Result<Arc<Self>> {
        let pages_max = placer::host_bytes() / PAGE_BYTES as u64;
        let (come, in_flight) = unbounded();
        let sharing = Arc::new(Self {
            secret,
            index: Index::new(pages_max),
            in_flight: Mutex::default(),
            arriving: Mutex::default(),
            last: AtomicU64::new(0),
            kept: Mutex::default(),
            scanner: Mutex::default(),
            come,
            rack,
        });
        let weak = Arc::downgrade(&sharing);
        // It ends by itself when nobody has the sharing any more.
        thread::Builder::new()
            .name("sharing".to_owned())
            .spawn(move || settle::run(&weak, &in_flight))?;
        Ok(sharing)
    }

    /// What names the pages of a domain.
    #[must_use]
    pub fn key(&self, domain: &Domain) -> Key {
        Key::new(&self.secret, domain)
    }

    /// The rack that this host stands in.
    #[must_use]
    pub fn rack(&self) -> Option<&Arc<Rack>> {
        self.rack.as_ref()
    }

    /// The source of its VM sends the page after all, which it was waited for in
    /// vain.
    fn have_sent_again(&self, name: Name, page: &Page) {
        page.recipient.waited_in_vain(1);
        self.have_sent(name, page);
    }

    /// The source of its VM sends the page.
    fn have_sent(&self, name: Name, Page { recipient, place }: &Page) {
        let Place { block, epoch, page, .. } = *place;
        self.wake_waiters(&recipient.asks(std::iter::once((block, epoch, page, name))));
        recipient.settled(*place, true);
    }

    /// What these wait for doesn't come from where it was to.
    fn look_elsewhere(&self, waiters: Vec<(Name, Waiter)>) {
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
            // Its thread lives as long as the sharing.
            let _ = self.come.send(served);
        }
    }
}
