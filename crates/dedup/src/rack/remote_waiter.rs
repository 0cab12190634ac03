//! Another host that waits for content which arrives here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use content::{Domain, Name};
use crossbeam_channel::Sender;

/// A peer that waits for contents of one domain.
#[derive(Debug)]
pub(crate) struct RemoteWaiter {
    pub(super) domain: Domain,
    pub(super) come: Sender<Come>,
    /// Its connection has ended.
    pub(super) is_over: Arc<AtomicBool>,
}

/// What happened to content that a peer waits for.
#[derive(Debug)]
pub(super) enum Come {
    Here(Domain, Name),
    NotHere(Name),
}

impl RemoteWaiter {
    /// The content should be here now.
    pub(crate) fn here(&self, name: Name) {
        self.tell(Come::Here(self.domain.clone(), name));
    }

    /// The content won't be here.
    pub(crate) fn not_here(&self, name: Name) {
        self.tell(Come::NotHere(name));
    }

    /// Whether its connection has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    fn tell(&self, come: Come) {
        // The connection may have ended.
        let _ = self.come.send(come);
    }
}
