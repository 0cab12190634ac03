//! The hosts that VMs can move to.

use std::net::SocketAddr;

use api::ErrorCode;
use engine::Peer;

use super::Migrations;
use crate::config::PeerEntry;
use crate::denied::Denied;

impl Migrations {
    /// A host that VMs can move to.
    pub(crate) fn peer(&self, name: &str) -> Result<Peer, Denied> {
        let here = &self.local.agent;
        if name == here {
            let text = format!("{name} is this host: the VM is already there");
            return Err(Denied::Coded(ErrorCode::AlreadyThere, text));
        }
        let Some(peer) = self.routes.peers.named(name) else {
            return Err(Denied::Coded(ErrorCode::NoSuchHost, self.routes.no_such_host(name)));
        };
        // Outgoing migrations need the same protection as incoming ones.
        let may_leave = self.local.security.is_secure() || self.routes.insecure_plaintext;
        if !may_leave && !is_private(&peer) {
            let text = format!(
                "the memory of the VM would cross the network to {name} unencrypted: give this \
                 host a certificate (`droveway ca issue {here}`, --tls), or, on a network of your \
                 own, start the agent with --insecure-plaintext"
            );
            return Err(Denied::Coded(ErrorCode::NotEncrypted, text));
        }
        Ok(Peer { name: peer.name, address: peer.address, nics: peer.nics })
    }
}

/// Whether all addresses of the peer are on loopback, which no other host can reach.
fn is_private(peer: &PeerEntry) -> bool {
    let addresses = std::iter::once(peer.address).map(|address: SocketAddr| address.ip());
    addresses.chain(peer.nics.iter().copied()).all(|address| address.is_loopback())
}
