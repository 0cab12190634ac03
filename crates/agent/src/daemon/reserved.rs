//! What one agent alone can have. A second agent that is started by mistake fails here with a clear
//! error, and touches no VM.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use dedup::destination::Sharing;
use engine::{Local, Resources, XenHost};
use host::quota::Notes;
use identity::{FileError, Files, Identity, IdentityError, Security};
use managers::xen::Xl;
use managers::{kubevirt, libvirt, proxmox};
use qemu::launch::User;
use qemu::programs::Programs;
use switchover::Kept;
use switchover::journal::JournalDir;
use tokio::runtime::Runtime;
use tokio::signal::unix::Signal;

use super::error::{AgentError, local_error};
use super::process::Configured;
use super::rack::rack;
use crate::api::Port;
use crate::api::socket::ApiSocket;
use crate::config::{Carry, Config, Manager, Xen};
use crate::state::StateDir;
use crate::user;
use crate::vms::logs;

/// What the process owns, whichever VMs there are.
pub(super) struct Owned {
    pub(super) runtime: Runtime,
    pub(super) hangups: [Signal; 2],
    pub(super) config: Config,
    pub(super) identity: Option<Arc<Identity>>,
    pub(super) local: Local,
    /// The port for agents of other hosts.
    pub(super) port: TcpListener,
    pub(super) socket: ApiSocket,
    pub(super) listeners: Listeners,
}

/// The sockets of the API and of the metrics.
pub(super) struct Listeners {
    pub(super) api: UnixListener,
    pub(super) people: Option<Port>,
    pub(super) metrics: Option<TcpListener>,
}

/// This host's state, locked and not searched yet.
pub(super) struct Reserved {
    pub(super) owned: Owned,
    pub(super) state: StateDir,
    pub(super) qemu_user: Option<User>,
    /// The switchovers that an earlier run left.
    pub(super) kept: Vec<Kept>,
}

impl Configured {
    pub(super) fn reserve(self) -> Result<Reserved, AgentError> {
        let Self { runtime, hangups, config } = self;
        let identity = match &config.tls {
            Some(dir) => Some(Arc::new(identify(&config.name, dir)?)),
            None => None,
        };
        let state = StateDir::open(&config.state)?;
        // Before the search for VMs, which waits for QEMUs that hang.
        runtime.spawn(logs::bound(state.vms()));
        let port = bind(config.listen)?;
        check_nics(&config.nics)?;
        let qemu_user = config.qemu_user.as_deref().map(user::named).transpose()?;
        let programs = Programs::new(&config.qemu_programs, qemu_user.clone())?;
        let journals = JournalDir::open(&state.journals())?;
        let kept = journals.contents()?;
        let quota_notes = lift_throttles(&state)?;
        let security = identity.clone().map_or(Security::Plaintext, Security::Tls);
        let speeds =
            config.nic_speeds.iter().map(|nic| (nic.address, nic.rate.bytes_per_s())).collect();
        let local = Local {
            agent: config.name.clone(),
            security: security.clone(),
            nics: config.nics.clone(),
            resources: Resources::new(config.pool_bytes, speeds),
            programs: Arc::new(programs),
            scratch: state.scratch(),
            fixed_cost: Arc::default(),
            journals,
            quota_notes: config.cgroups.then_some(quota_notes),
            agent_port: config.listen.port(),
            cpu_floor: config.cpu_floor,
            waits: config.waits,
            sharing: sharing(&config, security)?,
            manager: config.carry.as_ref().map(manager),
            xen: xen_host(config.xen.as_ref(), &state)?,
        };
        let api_group = config.api_group.as_deref().map(user::group).transpose()?;
        let (socket, api) = ApiSocket::bind(&config.api, api_group)?;
        let people = match (config.api_listen, &identity) {
            (Some(address), Some(identity)) => {
                Some(Port { listener: bind(address)?, identity: Arc::clone(identity) })
            }
            _ => None,
        };
        let metrics = config.metrics_listen.map(bind).transpose()?;
        let listeners = Listeners { api, people, metrics };
        let owned = Owned { runtime, hangups, config, identity, local, port, socket, listeners };
        Ok(Reserved { owned, state, qemu_user, kept })
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener, AgentError> {
    TcpListener::bind(address).map_err(|source| AgentError::Listen { address, source })
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

/// Checks that lanes can be bound to each address.
fn check_nics(nics: &[IpAddr]) -> Result<(), AgentError> {
    for &nic in nics {
        TcpListener::bind((nic, 0)).map_err(|source| AgentError::Nic { nic, source })?;
    }
    Ok(())
}

/// Lifts the throttles of VMs that an earlier run left behind when it was killed.
fn lift_throttles(state: &StateDir) -> Result<Notes, AgentError> {
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

/// Domains of Xen, and the journals of their switchovers. Those that are left are settled also if
/// `[xen]` was removed: if this agent answered that it knows nothing of them, the other one would
/// destroy a copy that was given to it.
fn xen_host(xen: Option<&Xen>, state: &StateDir) -> Result<Option<Arc<XenHost>>, AgentError> {
    let dir = state.domain_journals();
    if xen.is_none() && !dir.is_dir() {
        return Ok(None);
    }
    let journals = JournalDir::open(&dir)?;
    let Xen { xl, accept_from } = match xen {
        Some(xen) => xen.clone(),
        None if journals.count()? == 0 => return Ok(None),
        None => {
            tracing::warn!("there is no [xen], but migrations of domains that are not settled");
            Xen::default()
        }
    };
    Ok(Some(Arc::new(XenHost { xl: Arc::new(Xl::new(xl)), journals, accept_from })))
}

/// The program whose migrations are carried here.
fn manager(carry: &Carry) -> Arc<dyn managers::Manager> {
    match carry.manager {
        Manager::Libvirt => Arc::new(libvirt::Host {
            address: carry.address,
            ports: carry.ports.clone(),
            directory: carry.directory.clone(),
        }),
        Manager::Kubevirt => Arc::new(kubevirt::Node::default()),
        Manager::Proxmox => Arc::new(proxmox::Host::new(&carry.directory)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn domains_are_settled_also_after_their_section_was_removed() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert!(xen_host(None, &state).unwrap().is_none());
        assert!(xen_host(Some(&Xen::default()), &state).unwrap().is_some());
        assert!(xen_host(None, &state).unwrap().is_none());
        fs::write(state.domain_journals().join("m1.source"), "").unwrap();
        let host = xen_host(None, &state).unwrap().unwrap();
        assert_eq!((host.accept_from.len(), host.journals.count().unwrap()), (0, 1));
    }
}
