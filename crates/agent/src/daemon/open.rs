//! The agent is open to agents of other hosts, and to programs that move VMs themselves.

use std::net::IpAddr;
use std::sync::Arc;

use api::HostInfo;
use engine::{KnownHosts, Server};
use identity::{Files, Identity};
use tokio::runtime::Runtime;
use tokio::signal::unix::Signal;
use tokio::sync::watch;

use super::error::{AgentError, local_error};
use super::reserved::{Listeners, Owned};
use super::settling::Settling;
use super::this_host::ThisHost;
use crate::api::socket::ApiSocket;
use crate::api::{Api, CachedText, Watchers};
use crate::carry::{CarryListeners, Reopener};
use crate::config::{Config, PeerEntry, Webhook};
use crate::events::Reader;
use crate::examiner::Examiner;
use crate::gangs::{Gangs, OrderHandler};
use crate::moves::arrivals::Arrivals;
use crate::moves::migrations::Migrations;
use crate::peers::{Peers, PeersFile, PeersListener, Routes};

/// VMs can arrive and be carried. No one can give orders yet.
pub(super) struct Open {
    pub(super) runtime: Runtime,
    pub(super) socket: ApiSocket,
    pub(super) api: Api,
    /// Has the API start nothing any more.
    pub(super) refuse: watch::Sender<bool>,
    pub(super) listeners: Listeners,
    pub(super) server: Server,
    pub(super) carry_listeners: Option<CarryListeners>,
    pub(super) followed: Followed,
}

/// What is watched while the API is served.
pub(super) struct Followed {
    pub(super) certificate: Option<(Arc<Identity>, Files)>,
    pub(super) peers: Option<PeersReading>,
    pub(super) webhook: Option<(Webhook, Reader)>,
    pub(super) hangups: [Signal; 2],
}

impl Settling {
    pub(super) fn open(self) -> Result<Open, AgentError> {
        let Self { owned, peers, settlers, webhook, kept_hosts } = self;
        let Owned { runtime, hangups, config, identity, local, port, socket, listeners } = owned;
        let registry = Arc::clone(&settlers.registry);
        let events = Arc::clone(&settlers.events);
        let routes = Routes { peers: peers.clone(), insecure_plaintext: config.insecure_plaintext };
        let examiner = Arc::new(Examiner::new(
            Arc::clone(&registry),
            local.clone(),
            routes.clone(),
            config.listen,
            config.nic_speeds.clone(),
            config.carry.clone(),
            config.passwords.clone(),
        ));
        let mover = Box::new(engine::migrate);
        let migrations = Arc::new(Migrations::new(&settlers, local.clone(), routes, mover));
        let order_handler = Arc::new(OrderHandler::new(
            Arc::clone(&migrations),
            Arc::clone(&examiner),
            Arc::clone(&registry),
            config.coordinators.clone(),
            config.rack.clone(),
            config.own.as_ref().and_then(|own| own.uplink),
        ));
        let gangs = Arc::new(Gangs::new(&order_handler, &events));
        let this_host = Arc::new(ThisHost {
            arrivals: Arrivals::new(&settlers, &examiner, peers.clone(), &config.waits),
            settlers: Arc::clone(&settlers),
            examiner: Arc::clone(&examiner),
            order_handler,
            peers: peers.clone(),
        });
        let known = hosts(&config.peers, &kept_hosts);
        let server = engine::serve(port, known, this_host, local.clone())
            .map_err(|source| local_error("listening to peers", source))?;
        let carry_listeners = match &config.carry {
            Some(carry) => {
                let (migrations, examiner) = (Arc::clone(&migrations), Arc::clone(&examiner));
                Some(CarryListeners::open(carry, &config.peers, local, migrations, examiner)?)
            }
            None => None,
        };
        if config.insecure_plaintext {
            tracing::warn!(listen = %config.listen, "guest memory crosses the network unencrypted");
        }
        let others = PeersListeners {
            known_hosts: server.known_hosts(),
            kept_hosts,
            carry_listeners: carry_listeners.as_ref().map(CarryListeners::reopener),
        };
        let followed = Followed {
            certificate: identity.clone().zip(config.tls.as_deref().map(Files::within)),
            peers: peers_reading(&config, &peers, others),
            webhook,
            hangups,
        };
        let (refuse, closing) = watch::channel(false);
        let api = Api {
            host: Arc::new(host_info(&config)),
            peers,
            registry,
            settlers,
            migrations,
            gangs,
            examiner,
            events,
            identity,
            watchers: Watchers::default(),
            metrics: CachedText::default(),
            closing,
        };
        Ok(Open { runtime, socket, api, refuse, listeners, server, carry_listeners, followed })
    }
}

/// The peers file, and all that use its contents.
pub(super) struct PeersReading {
    pub(super) file: PeersFile,
    pub(super) peers: Peers,
    pub(super) others: Box<PeersListeners>,
}

pub(super) struct PeersListeners {
    known_hosts: KnownHosts,
    /// The hosts of switchovers that were unfinished when the agent started.
    kept_hosts: Vec<IpAddr>,
    carry_listeners: Option<Reopener>,
}

impl PeersListener for PeersListeners {
    fn peers_are(&self, peers: &[PeerEntry]) {
        let is_listed = |host: &str| peers.iter().any(|peer| peer.name == host);
        self.known_hosts.are(hosts(peers, &self.kept_hosts), is_listed);
        if let Some(carry_listeners) = &self.carry_listeners {
            carry_listeners.reopen(peers);
        }
    }
}

/// All known addresses of other hosts.
fn hosts(peers: &[PeerEntry], kept: &[IpAddr]) -> Vec<IpAddr> {
    peers.iter().flat_map(PeerEntry::addresses).chain(kept.iter().copied()).collect()
}

/// None if there is no peers file.
fn peers_reading(config: &Config, peers: &Peers, others: PeersListeners) -> Option<PeersReading> {
    let file = PeersFile {
        path: config.peers_file.clone()?,
        name: config.name.clone(),
        own: config.own.clone(),
        rack: config.rack.clone(),
    };
    Some(PeersReading { file, peers: peers.clone(), others: Box::new(others) })
}

fn host_info(config: &Config) -> HostInfo {
    HostInfo {
        name: config.name.clone(),
        rack: config.rack.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        listen: config.listen.to_string(),
        nics: config.nics.iter().map(ToString::to_string).collect(),
        peers: Vec::new(),
    }
}
