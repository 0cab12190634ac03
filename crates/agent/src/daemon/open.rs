//! The agent is open to agents of other hosts, and to programs that move VMs themselves.

use std::net::IpAddr;
use std::sync::Arc;

use api::{HostInfo, domain_socket};
use engine::{Local, Server};
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
use crate::carry::CarryListeners;
use crate::config::{Config, PeerEntry, Webhook};
use crate::events::Reader;
use crate::examiner::Examiner;
use crate::gangs::{Gangs, OrderHandler};
use crate::moves::arrivals::Arrivals;
use crate::moves::migrations::Migrations;
use crate::moves::recovery::{Settlers, kept};
use crate::peers::{NotifyOthers, Peers, PeersFile, Routes};
use crate::vms::registry::Registry;
use crate::xen::{DomainListener, DomainSettlers};

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
    /// None: domains of Xen neither leave nor arrive.
    pub(super) domains: Option<Domains>,
    pub(super) followed: Followed,
}

/// Domains of Xen.
pub(super) struct Domains {
    pub(super) settlers: Arc<DomainSettlers>,
    pub(super) listener: DomainListener,
    pub(super) _socket: ApiSocket,
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
        let Self { owned, peers, settlers, webhook, mut kept_hosts } = self;
        let Owned { runtime, hangups, config, identity, local, port, socket, listeners } = owned;
        let registry = Arc::clone(&settlers.registry);
        let events = Arc::clone(&settlers.events);
        let routes = Routes { peers: peers.clone(), insecure_plaintext: config.insecure_plaintext };
        let examiner = new_examiner(&config, &registry, &local, &routes);
        let mover = Box::new(engine::migrate);
        let migrations = Arc::new(Migrations::new(&settlers, local.clone(), routes, mover));
        let order_handler = new_order_handler(&config, &migrations, &examiner, &registry);
        let gangs = Arc::new(Gangs::new(&order_handler, &events));
        let domain_settlers = settle_domains(&local, &settlers, &peers, &mut kept_hosts)?;
        let this_host = Arc::new(ThisHost {
            arrivals: Arrivals::new(&settlers, &examiner, peers.clone(), &config.waits),
            settlers: Arc::clone(&settlers),
            domains: domain_settlers.clone(),
            examiner: Arc::clone(&examiner),
            order_handler,
            peers: peers.clone(),
        });
        let known = hosts(&config.peers, &kept_hosts);
        let server = engine::serve(port, known, this_host, local.clone())
            .map_err(|source| local_error("listening to peers", source))?;
        let domains = match &domain_settlers {
            Some(settlers) => Some(open_domains(&config, &local, &migrations, settlers)?),
            None => None,
        };
        let carry_listeners = open_carry(&config, local, &migrations, &examiner)?;
        if config.insecure_plaintext {
            tracing::warn!(listen = %config.listen, "guest memory crosses the network unencrypted");
        }
        let known_hosts = server.known_hosts();
        let reopen = carry_listeners.as_ref().map(CarryListeners::reopener);
        let others = move |peers: &[PeerEntry]| {
            let is_listed = |host: &str| peers.iter().any(|peer| peer.name == host);
            // Also the hosts of switchovers that were unfinished when the agent started.
            known_hosts.are(hosts(peers, &kept_hosts), is_listed);
            if let Some(reopen) = &reopen {
                reopen(peers);
            }
        };
        let followed = Followed {
            certificate: identity.clone().zip(config.tls.as_deref().map(Files::within)),
            peers: peers_reading(&config, &peers, Box::new(others)),
            webhook,
            hangups,
        };
        let (refuse, closing) = watch::channel(false);
        let api = Api {
            host: Arc::new(host_info(&config)),
            peers,
            registry,
            settlers,
            domains: domain_settlers,
            migrations,
            gangs,
            examiner,
            events,
            identity,
            watchers: Watchers::default(),
            metrics: CachedText::default(),
            closing,
        };
        Ok(Open {
            runtime,
            socket,
            api,
            refuse,
            listeners,
            server,
            carry_listeners,
            domains,
            followed,
        })
    }
}

fn new_examiner(
    config: &Config,
    registry: &Arc<Registry>,
    local: &Local,
    routes: &Routes,
) -> Arc<Examiner> {
    Arc::new(Examiner::new(
        Arc::clone(registry),
        local.clone(),
        routes.clone(),
        config.listen,
        config.nic_speeds.clone(),
        config.carry.clone(),
        config.passwords.clone(),
    ))
}

fn new_order_handler(
    config: &Config,
    migrations: &Arc<Migrations>,
    examiner: &Arc<Examiner>,
    registry: &Arc<Registry>,
) -> Arc<OrderHandler> {
    Arc::new(OrderHandler::new(
        Arc::clone(migrations),
        Arc::clone(examiner),
        Arc::clone(registry),
        config.coordinators.clone(),
        config.rack.clone(),
        config.own.as_ref().and_then(|own| own.uplink),
    ))
}

/// Opens the listeners for migrations that another program commands. None if none are carried.
fn open_carry(
    config: &Config,
    local: Local,
    migrations: &Arc<Migrations>,
    examiner: &Arc<Examiner>,
) -> Result<Option<CarryListeners>, AgentError> {
    let Some(carry) = &config.carry else { return Ok(None) };
    let (migrations, examiner) = (Arc::clone(migrations), Arc::clone(examiner));
    Ok(Some(CarryListeners::open(carry, &config.peers, local, migrations, examiner)?))
}

/// Continues switchovers of domains of Xen that an earlier run of the agent left.
fn settle_domains(
    local: &Local,
    settlers: &Settlers,
    peers: &Peers,
    kept_hosts: &mut Vec<IpAddr>,
) -> Result<Option<Arc<DomainSettlers>>, AgentError> {
    let Some(xen) = &local.xen else { return Ok(None) };
    let left = xen.journals.contents()?;
    kept_hosts.extend(kept::hosts(&left));
    let reported = (Arc::clone(&settlers.events), Arc::clone(&settlers.history));
    let this = (local.agent.as_str(), local.security.clone());
    let domains = DomainSettlers::new(Arc::clone(xen), reported, this, peers.clone());
    domains.take_up(left);
    Ok(Some(domains))
}

/// Opens the socket for xl's transports.
fn open_domains(
    config: &Config,
    local: &Local,
    migrations: &Arc<Migrations>,
    settlers: &Arc<DomainSettlers>,
) -> Result<Domains, AgentError> {
    let (_socket, listener) = ApiSocket::bind(&domain_socket(&config.api), None)?;
    let (migrations, settlers) = (Arc::clone(migrations), Arc::clone(settlers));
    let listener =
        DomainListener::start(listener, local.clone(), migrations, Arc::clone(&settlers))
            .map_err(|source| local_error("waiting for transports of xl", source))?;
    Ok(Domains { settlers, listener, _socket })
}

/// The peers file, and all that use its contents.
pub(super) struct PeersReading {
    pub(super) file: PeersFile,
    pub(super) peers: Peers,
    pub(super) others: Box<NotifyOthers>,
}

/// All known addresses of other hosts.
fn hosts(peers: &[PeerEntry], kept: &[IpAddr]) -> Vec<IpAddr> {
    peers.iter().flat_map(PeerEntry::addresses).chain(kept.iter().copied()).collect()
}

/// None if there is no peers file.
fn peers_reading(
    config: &Config,
    peers: &Peers,
    others: Box<NotifyOthers>,
) -> Option<PeersReading> {
    let file = PeersFile {
        path: config.peers_file.clone()?,
        name: config.name.clone(),
        own: config.own.clone(),
        rack: config.rack.clone(),
    };
    Some(PeersReading { file, peers: peers.clone(), others })
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
