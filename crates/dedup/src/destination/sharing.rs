//! Sharing of content among the VMs of a host.

use std::sync::Arc;

use content::{Domain, Key, Scanner};
use data_threads::DataThreads;
use page::PAGE_BYTES;
use parking_lot::Mutex;

use super::exchange::Exchange;
use super::outbox::Outbox;
use super::resolve::{Arriving, Resolving};
use crate::rack::Rack;

/// The content that an agent shares among the VMs of its host. Dropping it ends its thread.
pub struct Sharing {
    secret: Vec<u8>,
    pub(crate) exchange: Arc<Exchange>,
    pub(super) scanner: Mutex<Option<Scanner>>,
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sharing").finish_non_exhaustive()
    }
}

impl Sharing {
    /// Starts sharing on this host, in a cluster with this secret, and in this rack.
    pub fn start(secret: Vec<u8>, rack: Option<Arc<Rack>>) -> std::io::Result<Arc<Self>> {
        let pages_max = placer::host_bytes() / PAGE_BYTES as u64;
        let exchange = Exchange::start(pages_max, rack)?;
        let sharing = Self { secret, exchange, scanner: Mutex::default() };
        // Which VMs are in a domain of their own at other hosts is not known here.
        sharing.exchange.index.set_common(sharing.key(&Domain::default()));
        Ok(Arc::new(sharing))
    }

    /// The key that names the pages of a domain.
    #[must_use]
    pub fn key(&self, domain: &Domain) -> Key {
        Key::new(&self.secret, domain)
    }

    /// Admits a VM of this domain, which may use the rack's content if it `asks_rack`. The caller
    /// sends the [`Outbox`]'s messages to its source.
    pub fn admit(
        &self,
        (domain, asks_rack): (&Domain, bool),
        vm: Arriving,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<(Resolving, Outbox)> {
        self.exchange.admit(self.key(domain), asks_rack.then_some(domain), vm, threads)
    }

    /// The rack of this host.
    #[must_use]
    pub fn rack(&self) -> Option<&Arc<Rack>> {
        self.exchange.rack.as_ref()
    }
}
