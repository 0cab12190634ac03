//! The switchovers that an earlier run of the agent left: each is settled by a thread.

use std::net::IpAddr;
use std::sync::Arc;

use super::error::{AgentError, local_error};
use super::found::Found;
use super::reserved::Owned;
use crate::config::Webhook;
use crate::events::{Events, Limits, Reader};
use crate::moves::history::History;
use crate::moves::recovery::{Settlers, kept};
use crate::peers::Peers;

/// Each unfinished switchover has its thread, so that no peer and no user gets a VM that may
/// belong to another host.
pub(super) struct Settling {
    pub(super) owned: Owned,
    pub(super) peers: Peers,
    pub(super) settlers: Arc<Settlers>,
    pub(super) webhook: Option<(Webhook, Reader)>,
    /// The hosts of these switchovers.
    pub(super) kept_hosts: Vec<IpAddr>,
}

impl Found {
    pub(super) fn settle(self) -> Result<Settling, AgentError> {
        let Self { owned, registry, kept } = self;
        let config = &owned.config;
        let events = Events::new(Limits::default())
            .map_err(|source| local_error("reading random numbers", source))?;
        // Reads from the first event on: VMs in doubt are published before anything is served.
        let webhook = config.webhook.clone().and_then(|webhook| {
            let reader = events.read(None);
            let reader = reader
                .inspect_err(|denied| tracing::error!(%denied, "the webhook sends no events"));
            Some((webhook, reader.ok()?))
        });
        let peers = Peers::new(config.peers.clone(), config.peers_file.as_deref());
        let history = Arc::new(History::open(&config.name, registry.state().reports()));
        let settlers = Settlers::new(
            registry,
            events,
            history,
            owned.local.journals.clone(),
            &config.name,
            owned.local.security.clone(),
            peers.clone(),
        );
        let kept_hosts = kept::hosts(&kept).collect();
        settlers.take_up(kept);
        Ok(Settling { owned, peers, settlers, webhook, kept_hosts })
    }
}
