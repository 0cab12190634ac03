//! Content that need not be sent: pages that come by name, and are found on this
//! host.
//!
//! A source names the pages of QEMU's first pass. What this host has is copied
//! from the RAM of the VM that has it, named once more, and placed only if the name
//! is the same. What is on its way here already, for another VM or another page, is
//! waited for. All else is asked of the source. A name that nobody has, a copy that
//! has changed, a VM that never comes cost time, not content.

mod coming;
mod copies;
mod resolve;
mod settle;
mod taker;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use content::{Domain, Index, Key, Member, Name};
use crossbeam_channel::{Sender, unbounded};
use page::PAGE_BYTES;
use parking_lot::Mutex;

use coming::Coming;
pub(crate) use resolve::Resolving;
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
    /// What VMs that came hold, and where.
    members: Mutex<Vec<(Arc<Member>, Arc<Blocks>)>>,
    come: Sender<Vec<(Name, Waiter)>>,
}

/// A page that waits for its content.
struct Waiter {
    taker: Arc<Taker>,
    place: Place,
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sharing").finish_non_exhaustive()
    }
}

impl Sharing {
    /// For this host, in a cluster with this secret.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(secret: Vec<u8>) -> std::io::Result<Arc<Self>> {
        let pages_max = placer::host_bytes() / PAGE_BYTES as u64;
        let (come, coming) = unbounded();
        let sharing = Arc::new(Self {
            secret,
            index: Index::new(pages_max),
            coming: Mutex::default(),
            arriving: Mutex::default(),
            last: AtomicU64::new(0),
            members: Mutex::default(),
            come,
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

    /// A VM has come: what it holds is there for others, until its process ends.
    pub(crate) fn keep(&self, resolving: &Resolving) {
        self.members.lock().push(resolving.held());
    }

    /// Lets go of VMs that have left or ended.
    fn forget_ended(&self) {
        let gone = |(_, blocks): &mut (Arc<Member>, Arc<Blocks>)| !blocks.is_there();
        let mut members = self.members.lock();
        let ended: Vec<_> = members.extract_if(.., gone).collect();
        // Leaving the index is nothing to do under a lock.
        drop(members);
        drop(ended);
    }
}
