//! The agent's start, service and shutdown.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use api::HostInfo;
use dedup::destination::Sharing;
use engine::{Carrying, KnownHosts, Local, Resources, Server};
use identity::{FileError, Files, Identity, IdentityError, Security};
use qemu::programs::{PlaceError, Programs};
use quota::{Notes, QuotaError};
use sd_notify::NotifyState;
use switchover::journal::{JournalDir, JournalError};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::arrivals::Arrivals;
use crate::carry::{Doors, DoorsError, Reopener};
use crate::config::{Carry, Config, ConfigError, Flags, Manager, Password, PeerEntry, Webhook};
use crate::events::{Events, Limits, Reader};
use crate::examiner::Examiner;
use crate::gangs::{Gangs, OrderHandler};
use crate::holdings::Holdings;
use crate::http::{Api, CachedText, Port, Watchers, router, serve_metrics};
use crate::log;
use crate::migrations::{History, Migrations, Routes};
use crate::peers::{self, Peers, PeersFile, Told};
use crate::rack::{RackError, rack};
use crate::recovery::{Settlers, kept};
use crate::registry::Registry;
use crate::renewal;
use crate::scopes::Scopes;
use crate::service_manager;
use crate::socket::{ApiSocket, SocketError};
use crate::state::{StateDir, StateError};
use crate::user::{self, UserError};
use crate::vm_logs;
use crate::webhook;

/// How long a stopping agent waits for responses that are being written.
const ANSWERS_WAIT: Duration = Duration::from_secs(5);
/// How long a stopping agent waits for the QEMUs of cancelled arrivals to end.
const ARRIVALS_WAIT: Duration = Duration::from_secs(30);
/// How long a stopping agent waits for carried VMs in post-copy, which stop if their connections
/// break. The units in dist/ give the agent more time than that to end.
const POSTCOPY_WAIT: Duration = Duration::from_secs(300);

/// Why an agent can't run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its journals.
    #[error(transparent)]
    Journals(#[from] JournalError),
    /// Its API's socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The user that QEMUs are to run as.
    #[error(transparent)]
    User(#[from] UserError),
    /// The programs that other hosts may start here.
    #[error(transparent)]
    Programs(#[from] PlaceError),
    /// It can't listen at its address.
    #[error("listening at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// A NIC does not belong to this host.
    #[error("nic {nic} can't be used: {source}; is it an address of this host?")]
    Nic {
        /// Its address.
        nic: IpAddr,
        /// The reason.
        source: io::Error,
    },
    /// Its certificate is missing.
    #[error(
        "{source}; `droveway ca issue {name}` makes what belongs in {dir} (and `droveway ca init` \
         the CA)",
        dir = dir.display()
    )]
    NoCertificate {
        /// The directory that was searched.
        dir: PathBuf,
        /// This host.
        name: String,
        /// What is missing.
        source: IdentityError,
    },
    /// Its certificate can't be used.
    #[error(transparent)]
    Certificate(IdentityError),
    /// An earlier run's notes of throttled VMs can't be read.
    #[error(transparent)]
    Slowed(#[from] QuotaError),
    /// The rack's directory can't be used or kept.
    #[error(transparent)]
    Rack(#[from] RackError),
    /// The doors at which it stands for other hosts.
    #[error(transparent)]
    Doors(#[from] DoorsError),
    /// Another operation on this host failed.
    #[error("{what}: {source}")]
    Local {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Runs an agent until a signal ends it; VMs keep running.
///
/// # Errors
/// If it can't start, in words for the operator.
pub fn run(flags: &Flags) -> Result<(), AgentError> {
    // Before there are threads.
    let gives_back = page::give_back_freed_memory();
    // Early, because SIGHUP ends an agent that does not handle it.
    let (runtime, hangups) = runtime()?;
    let config = Config::new(flags)?;
    let _log = log::begin().map_err(|source| local_error("starting the log", source))?;
    for exposure in config.passwords.iter().filter_map(Password::exposure) {
        tracing::warn!("{exposure}");
    }
    if !gives_back {
        tracing::warn!(
            "cannot make the C library release freed memory: the agent grows with each move"
        );
    }
    if let Err(error) = qemu::launch::raise_open_files() {
        tracing::warn!(
            %error,
            "cannot raise the limit of open files: set LimitNOFILE= in the unit"
        );
    }
    let identity = match &config.tls {
        Some(dir) => Some(Arc::new(identify(&config.name, dir)?)),
        None => None,
    };
    let state = StateDir::open(&config.state)?;
    // Before the search for VMs, which waits for QEMUs that hang.
    runtime.spawn(vm_logs::bound(state.vms()));
    let listener = TcpListener::bind(config.listen)
        .map_err(|source| AgentError::Listen { address: config.listen, source })?;
    check_nics(&config.nics)?;
    let qemu_user = config.qemu_user.as_deref().map(user::named).transpose()?;
    let programs = Arc::new(Programs::new(&config.qemu_programs, qemu_user.clone())?);
    let journals = JournalDir::open(&state.journals())?;
    let kept = journals.contents()?;
    let slowed = let_go(&state)?;
    let speeds =
        config.nic_speeds.iter().map(|nic| (nic.address, nic.rate.bytes_per_s())).collect();
    let security = identity.clone().map_or(Security::Plaintext, Security::Tls);
    let local = Local {
        agent: config.name.clone(),
        security: security.clone(),
        nics: config.nics.clone(),
        resources: Resources::with_speeds(config.pool_bytes, speeds),
        programs,
        scratch: state.scratch(),
        fixed_cost: Arc::default(),
        journals: journals.clone(),
        slowed: config.cgroups.then_some(slowed),
        agent_port: config.listen.port(),
        waits: config.waits,
        sharing: sharing(&config, security)?,
        carrying: config.carry.as_ref().map(carrying),
    };
    // Before the search for VMs, so that a second agent that is started by mistake fails
    // here with a clear error and touches no VM.
    let api_group = config.api_group.as_deref().map(user::group).transpose()?;
    let (socket, api_listener) = ApiSocket::bind(&config.api, api_group)?;
    let port = match (config.api_listen, &identity) {
        (Some(address), Some(identity)) => Some(Port {
            listener: TcpListener::bind(address)
                .map_err(|source| AgentError::Listen { address, source })?,
            identity: Arc::clone(identity),
        }),
        _ => None,
    };
    let metrics = config.metrics_listen.map(|address| {
        TcpListener::bind(address).map_err(|source| AgentError::Listen { address, source })
    });
    let metrics = metrics.transpose()?;
    let registry = Registry::open(state, &kept::held(&kept));
    let registry = registry.map_err(|source| local_error("finding VMs", source))?;
    let registry = registry.with_qemu_user(qemu_user).with_scopes(Scopes::new());
    let registry = Arc::new(registry.with_holdings(holdings(&config, local.sharing.as_ref())?));
    let events = Events::new(Limits::default())
        .map_err(|source| local_error("reading random numbers", source))?;
    // Reads from the first event on: VMs in doubt are published before anything is served.
    let webhook = config.webhook.clone().and_then(|webhook| {
        let reader = events.read(None);
        let reader =
            reader.inspect_err(|denied| tracing::error!(%denied, "the webhook sends no events"));
        Some((webhook, reader.ok()?))
    });
    let peers = Peers::new(config.peers.clone(), config.peers_file.as_deref());
    let history = Arc::new(History::open(&config.name, registry.state().reports()));
    let settlers = Settlers::new(
        Arc::clone(&registry),
        Arc::clone(&events),
        history,
        journals,
        &config.name,
        local.security.clone(),
        peers.clone(),
    );
    let kept_hosts: Vec<IpAddr> = kept::hosts(&kept).collect();
    // Before a peer or a user can ask for one of them.
    settlers.take_up(kept);
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
    ));
    let gangs = Arc::new(Gangs::new(&order_handler, &events));
    let arrivals =
        Arrivals::new(&settlers, &examiner, &order_handler, peers.clone(), &config.waits);
    let arrivals = Arc::new(arrivals);
    let server =
        engine::serve(listener, hosts(&config.peers, &kept_hosts), arrivals, local.clone())
            .map_err(|source| local_error("listening to peers", source))?;
    let doors = match &config.carry {
        Some(carry) => {
            let (migrations, examiner) = (Arc::clone(&migrations), Arc::clone(&examiner));
            Some(Doors::open(carry, &config.peers, local, migrations, examiner)?)
        }
        None => None,
    };
    let reading = config.peers_file.clone().map(|path| PeersReading {
        file: PeersFile {
            path,
            name: config.name.clone(),
            own: config.own.clone(),
            rack: config.rack.clone(),
        },
        peers: peers.clone(),
        others: Box::new(ToldOfPeers {
            known_hosts: server.known_hosts(),
            kept_hosts,
            doors: doors.as_ref().map(Doors::reopener),
        }),
    });
    if config.insecure_plaintext {
        tracing::warn!(listen = %config.listen, "guest memory crosses the network unencrypted");
    }
    let host = Arc::new(host_info(&config));
    let api = |closing| Api {
        host: Arc::clone(&host),
        peers: peers.clone(),
        registry: Arc::clone(&settlers.registry),
        settlers: Arc::clone(&settlers),
        migrations: Arc::clone(&migrations),
        gangs: Arc::clone(&gangs),
        examiner: Arc::clone(&examiner),
        events: Arc::clone(&events),
        identity: identity.clone(),
        watchers: Watchers::default(),
        metrics: CachedText::default(),
        closing,
    };
    let listeners = Listeners { api: api_listener, people: port, metrics };
    let certificate = identity.clone().zip(config.tls.as_deref().map(Files::within));
    let followed = Followed { certificate, peers: reading, webhook, hangups };
    let served = serve(runtime, listeners, followed, api, (server, doors));
    settlers.close();
    drop(socket);
    tracing::info!("ended; VMs keep running");
    served
}

/// The runtime of the API, and two streams of SIGHUPs from now on: one for the peers file, one for
/// the certificate.
fn runtime() -> Result<(Runtime, [Signal; 2]), AgentError> {
    let starting = |source| local_error("starting the API", source);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("api")
        .enable_all()
        .build()
        .map_err(starting)?;
    let within = runtime.enter();
    let hangup = || signal(SignalKind::hangup()).map_err(starting);
    let hangups = [hangup()?, hangup()?];
    drop(within);
    Ok((runtime, hangups))
}

/// Where carried migrations reach this host's QEMUs.
fn carrying(carry: &Carry) -> Carrying {
    match carry.manager {
        Manager::Libvirt => Carrying::Host {
            address: carry.address,
            ports: carry.ports.clone(),
            directory: carry.directory.clone(),
        },
        Manager::Kubevirt => Carrying::Kubevirt(kubevirt::Node::default()),
        Manager::Proxmox => Carrying::Proxmox(proxmox::Host::new(&carry.directory)),
    }
}

/// Lifts the throttles of VMs that an earlier run left behind when it was killed.
fn let_go(state: &StateDir) -> Result<Notes, AgentError> {
    let notes = Notes::open(&state.slowed())?;
    for left in notes.left()? {
        let lifted = left.and_then(|left| {
            let pid = left.pid();
            left.lift().map(|()| pid)
        });
        match lifted {
            Ok(pid) => tracing::info!(pid, "a throttle that an agent left behind is lifted"),
            Err(error) => tracing::error!(%error, "a VM may still be throttled"),
        }
    }
    Ok(notes)
}

/// The sockets of the API and of the metrics.
struct Listeners {
    api: UnixListener,
    people: Option<Port>,
    metrics: Option<TcpListener>,
}

/// The peers file, and all that use its contents.
struct PeersReading {
    file: PeersFile,
    peers: Peers,
    others: Box<ToldOfPeers>,
}

struct ToldOfPeers {
    known_hosts: KnownHosts,
    /// The hosts of switchovers that were unfinished when the agent started.
    kept_hosts: Vec<IpAddr>,
    doors: Option<Reopener>,
}

impl Told for ToldOfPeers {
    fn peers_are(&self, peers: &[PeerEntry]) {
        let is_listed = |host: &str| peers.iter().any(|peer| peer.name == host);
        self.known_hosts.are(hosts(peers, &self.kept_hosts), is_listed);
        if let Some(doors) = &self.doors {
            doors.reopen(peers);
        }
    }
}

/// All known addresses of other hosts.
fn hosts(peers: &[PeerEntry], kept: &[IpAddr]) -> Vec<IpAddr> {
    peers.iter().flat_map(PeerEntry::addresses).chain(kept.iter().copied()).collect()
}

/// What is watched while the API is served.
struct Followed {
    certificate: Option<(Arc<Identity>, Files)>,
    peers: Option<PeersReading>,
    webhook: Option<(Webhook, Reader)>,
    hangups: [Signal; 2],
}

/// Serves the API until a signal arrives, then shuts everything down in order.
fn serve(
    runtime: Runtime,
    Listeners { api: listener, people, metrics }: Listeners,
    followed: Followed,
    api: impl FnOnce(watch::Receiver<bool>) -> Api,
    (mut server, mut doors): (Server, Option<Doors>),
) -> Result<(), AgentError> {
    let result = runtime.block_on(async {
        let serving = |source| local_error("serving the API", source);
        listener.set_nonblocking(true).map_err(serving)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(serving)?;
        let (refuse, closing) = watch::channel(false);
        let (close, mut closed) = watch::channel(false);
        let api = api(closing);
        let Api { host, gangs, migrations, registry, events, .. } = api.clone();
        let mut interrupt = signal(SignalKind::interrupt()).map_err(serving)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(serving)?;
        let serving_metrics = metrics.map(|listener| {
            let serving = serve_metrics(listener, api.clone(), closed.clone());
            tokio::spawn(async {
                if let Err(error) = serving.await {
                    tracing::error!(%error, "the listener for metrics has failed");
                }
            })
        });
        let serving_people = people.map(|port| {
            let serving = port.serve(api.clone(), closed.clone());
            tokio::spawn(async {
                if let Err(error) = serving.await {
                    tracing::error!(%error, "the API's TCP listener has failed");
                }
            })
        });
        let serving_api = tokio::spawn(
            axum::serve(listener, router(api))
                .with_graceful_shutdown(async move {
                    // An error means that the sender was dropped, which is an end as well.
                    let _ = closed.wait_for(|closing| *closing).await;
                })
                .into_future(),
        );
        tracing::info!(host = host.name, listen = host.listen, "the agent is ready");
        service_manager::tell(NotifyState::Ready);
        let [for_peers, for_certificate] = followed.hangups;
        if let Some(PeersReading { file, peers, others }) = followed.peers {
            tokio::spawn(peers::follow(file, peers, others, for_peers));
        }
        if let Some((identity, files)) = followed.certificate {
            tokio::spawn(renewal::follow(identity, files, Arc::clone(&events), for_certificate));
        }
        let sending_events = followed
            .webhook
            .map(|(webhook, reader)| tokio::spawn(webhook::follow(webhook, reader)));
        tokio::spawn(service_manager::watched());
        tokio::spawn({
            let (registry, migrations) = (Arc::clone(&registry), Arc::clone(&migrations));
            service_manager::shown(move || in_a_line(&registry, &migrations))
        });
        let mut signals = async || {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        signals().await;
        tracing::info!("stopping; migrations are cancelled, VMs keep running");
        service_manager::tell(NotifyState::Stopping);
        // During the shutdown the API answers, but starts nothing.
        let _ = refuse.send(true);
        let winding_down = tokio::task::spawn_blocking(move || {
            let until = Instant::now() + POSTCOPY_WAIT;
            if let Some(doors) = &mut doors {
                doors.stop_accepting();
            }
            // First, so that gangs don't take the end of this agent's migrations for failures.
            gangs.close();
            migrations.close(until);
            if let Some(doors) = &doors {
                doors.wait_around(until);
            }
            // Joins the threads of what was carried, which publish how it ended.
            drop(doors);
            let vms = server.wait_postcopies(until);
            if vms > 0 {
                tracing::error!(
                    vms,
                    "aborting migrations in post-copy: VMs that run here stop now, until their \
                     managers resume their migrations"
                );
            }
            server.stop();
            if !registry.wait_none_arriving(ARRIVALS_WAIT) {
                tracing::warn!("a VM that was arriving is still there");
            }
        });
        tokio::select! {
            _ = winding_down => {}
            // A second signal ends the agent at once; the next start cleans up.
            () = signals() => return Ok(()),
        }
        // Only now, because the ends of migrations are events too.
        events.close();
        let _ = close.send(true);
        let _ = tokio::time::timeout(ANSWERS_WAIT, serving_api).await;
        for serving in serving_people.into_iter().chain(serving_metrics) {
            let _ = tokio::time::timeout(ANSWERS_WAIT, serving).await;
        }
        if let Some(sending) = sending_events {
            let _ = tokio::time::timeout(ANSWERS_WAIT, sending).await;
        }
        Ok(())
    });
    runtime.shutdown_background();
    result
}

/// Loads this host's identity from the files that `droveway ca issue` made.
fn identify(name: &str, dir: &Path) -> Result<Identity, AgentError> {
    let identity = Identity::load(name, &Files::within(dir)).map_err(|source| match source {
        IdentityError::File(FileError::Unreadable { .. }) => {
            AgentError::NoCertificate { dir: dir.to_owned(), name: name.to_owned(), source }
        }
        source => AgentError::Certificate(source),
    })?;
    tracing::info!("connections are encrypted; certificate {}", identity.validity());
    if let Some(warning) = identity.warning(SystemTime::now()) {
        tracing::warn!("{warning}");
    }
    Ok(identity)
}

/// Starts sharing content between arriving VMs; none if the operator disabled it.
fn sharing(config: &Config, security: Security) -> Result<Option<Arc<Sharing>>, AgentError> {
    if !config.sharing {
        return Ok(None);
    }
    let secret = match &config.tls {
        Some(dir) => Files::within(dir).content_secret().map_err(IdentityError::File),
        // An eavesdropper sees the content itself, so a secret would protect nothing.
        None => Ok(Some(Vec::new())),
    };
    let Some(secret) = secret.map_err(AgentError::Certificate)? else {
        tracing::warn!(
            "VMs that arrive here share no content: content.key is missing next to the \
             certificate; issue the certificate again"
        );
        return Ok(None);
    };
    let rack = rack(config, security)?;
    let sharing = Sharing::start(secret, rack);
    sharing.map(Some).map_err(|source| local_error("starting a thread", source))
}

/// Starts the scan of this host's VMs; none if it is disabled.
fn holdings(
    config: &Config,
    sharing: Option<&Arc<Sharing>>,
) -> Result<Option<Holdings>, AgentError> {
    let cpu_share = config.scan_cpu.of_one();
    let Some(sharing) = sharing.filter(|_| cpu_share > 0.0) else { return Ok(None) };
    let started = Holdings::start(Arc::clone(sharing), cpu_share);
    started.map(Some).map_err(|source| local_error("starting a thread", source))
}

/// Checks that lanes can be bound to each address.
fn check_nics(nics: &[IpAddr]) -> Result<(), AgentError> {
    for &nic in nics {
        TcpListener::bind((nic, 0)).map_err(|source| AgentError::Nic { nic, source })?;
    }
    Ok(())
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

/// The agent's state, for the line of `systemctl status`.
fn in_a_line(registry: &Registry, migrations: &Migrations) -> String {
    let moving = migrations.moving().len();
    format!("VMs: {}, migrations from here: {moving}", registry.count())
}

fn local_error(what: &'static str, source: io::Error) -> AgentError {
    AgentError::Local { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each QEMU that hangs takes seconds, and killing the agent would not make it ready sooner.
    #[test]
    fn an_agent_may_take_its_time_to_find_its_vms() {
        for unit in [
            include_str!("../../../dist/systemd/droveway.service"),
            include_str!("../../../dist/systemd/droveway-carry.service"),
        ] {
            assert!(unit.lines().any(|line| line == "Type=notify"), "{unit}");
            assert!(unit.lines().any(|line| line == "TimeoutStartSec=infinity"), "{unit}");
        }
    }

    #[test]
    fn an_agent_that_waits_for_a_post_copy_is_not_killed_before() {
        let stop = "TimeoutStopSec=";
        let files = [
            (include_str!("../../../dist/systemd/droveway.service"), stop),
            (include_str!("../../../dist/systemd/droveway-carry.service"), stop),
            (
                include_str!("../../../dist/kubevirt/daemonset.yaml"),
                "terminationGracePeriodSeconds: ",
            ),
        ];
        for (text, key) in files {
            let seconds = text.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap();
            let time = Duration::from_secs(seconds.parse().unwrap());
            assert!(time > POSTCOPY_WAIT + ARRIVALS_WAIT + 3 * ANSWERS_WAIT, "{key}{seconds}");
        }
    }
}
