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

mod brought;
mod claims;
mod coming;
mod copies;
mod kept;
mod rack;
mod resolve;
mod settle;
mod storage;
mod taker;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use content::{Domain, Index, Key, Name, Scanner};
use crossbeam_channel::{Sender, unbounded};
use page::PAGE_BYTES;
use parking_lot::Mutex;

use coming::{Bringer, Coming, Standing};
use kept::Kept;
pub use kept::{Known, WatchError};
use rack::Far;
pub(crate) use rack::serve;
pub use rack::{DirectoryAt, Rack};
pub(crate) use resolve::Resolving;
pub(crate) use storage::{Disks, Stored};
pub(crate) use taker::Blocks;
use taker::{Place, Taker};

/// What an agent shares among the VMs that come to its host. Dropping it ends its
/// thread.
pub struct Sharing {
    secret: Vec<u8>,
    index: Arc<Index>,
    coming: Mutex<Coming<Waiter>>,
    /// Those that are being moved here, by number.
    arriving: Mutex<HashSet<u64>>,
    last: AtomicU64,
    /// VMs of this host.
    kept: Mutex<Vec<Kept>>,
    scanner: Mutex<Option<Scanner>>,
    come: Sender<Vec<(Name, Waiter)>>,
    /// None: this host stands alone.
    rack: Option<Arc<Rack>>,
}

/// Who waits for content.
enum Waiter {
    /// A page of a VM that comes here.
    Page(Page),
    /// Another host of the rack.
    Far(Arc<Far>),
}

/// A page that waits for its content.
struct Page {
    taker: Arc<Taker>,
    place: Place,
}

impl Page {
    /// Whether both can be placed in one go.
    fn goes_with(&self, other: &Self) -> bool {
        let of = |page: &Self| (page.taker.number, page.place.block, page.place.epoch);
        of(self) == of(other)
    }
}

impl Waiter {
    /// What becomes of it if what it waits for doesn't come.
    fn standing(&self) -> Standing {
        match self {
            Self::Page(page) if page.taker.is_over() => Standing::Over,
            Self::Page(page) => Standing::Brings(Bringer::Vm(page.taker.number)),
            Self::Far(_) => Standing::Leaves,
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
        let (come, coming) = unbounded();
        let sharing = Arc::new(Self {
            secret,
            index: Index::new(pages_max),
            coming: Mutex::default(),
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
            .spawn(move || settle::run(&weak, &coming))?;
        Ok(sharing)
    }

    pub(crate) fn key(&self, domain: &Domain) -> Key {
        Key::new(&self.secret, domain)
    }

    /// The rack that this host stands in.
    pub(crate) fn rack(&self) -> Option<&Arc<Rack>> {
        self.rack.as_ref()
    }

    /// The source of its VM sends the page after all, which it was waited for in
    /// vain.
    fn have_sent_again(&self, name: Name, page: &Page) {
        page.taker.waited_in_vain(1);
        self.have_sent(name, page);
    }

    /// The source of its VM sends the page.
    fn have_sent(&self, name: Name, Page { taker, place }: &Page) {
        let Place { block, epoch, page, .. } = *place;
        self.over(&taker.asks(std::iter::once((block, epoch, page, name))));
        taker.settled(*place, true);
    }

    /// What these wait for doesn't come from where it was to.
    fn look_elsewhere(&self, waiters: Vec<(Name, Waiter)>) {
        for (name, waiter) in waiters {
            match waiter {
                Waiter::Page(page) => self.have_sent_again(name, &page),
                Waiter::Far(far) => far.not_here(name),
            }
        }
    }

    /// Contents have come, or will not come from where they were to: whoever waits
    /// for them looks, and has them from his own source if they are not here.
    fn over(&self, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        let mut served = Vec::new();
        let mut coming = self.coming.lock();
        for name in names {
            served.extend(coming.came(name).into_iter().map(|waiter| (*name, waiter)));
        }
        drop(coming);
        if !served.is_empty() {
            // Its thread lives as long as the sharing.
            let _ = self.come.send(served);
        }
    }
}
