//! The state of the destination's side.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use wire::Token;

use super::connections::Connections;
use super::lanes::ArrivingLanes;
use super::postcopies::Postcopies;
use crate::host::{Host, Local};

/// What all connections of other agents share.
pub(super) struct Shared {
    pub(super) host: Arc<dyn Host>,
    pub(super) local: Local,
    /// Whether VMs are no longer let in.
    pub(super) leaving: AtomicBool,
    pub(super) stopping: AtomicBool,
    pub(super) arrivals: Mutex<HashMap<Token, Arc<ArrivingLanes>>>,
    pub(super) connections: Arc<Connections>,
    pub(super) postcopies: Arc<Postcopies>,
    /// Whether the source is this agent too: see [`SameHost`](super::SameHost).
    pub(super) same_host: bool,
}

impl Shared {
    /// The peer, if its certificate names a host that this one doesn't admit.
    pub(super) fn not_listed<'p>(&self, peer: Option<&'p str>) -> Option<&'p str> {
        peer.filter(|peer| !self.host.admits(peer))
    }
}
