//! What a migration needs to know of the host it runs on.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use content::Domain;
use dedup::destination::Sharing;
use identity::Security;
use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::programs::Programs;
use switchover::MigrationId;
use switchover::destination::Driver;
use switchover::journal::JournalDir;
use transport::Endpoint;
use wire::carry::Target;
use wire::{Inquiry, Part, Word, examine, gang};

use crate::resources::Resources;
use crate::waits::Waits;

/// This agent, as far as migrations care.
#[derive(Clone, Debug)]
pub struct Local {
    /// Its name.
    pub agent: String,
    /// How it and others speak to one another.
    pub security: Security,
    /// The NICs that lanes leave by; empty means that routing decides.
    pub nics: Vec<IpAddr>,
    /// What all its migrations share.
    pub resources: Arc<Resources>,
    /// The programs of QEMU's that other hosts can have started here, and who
    /// they run as.
    pub programs: Arc<Programs>,
    /// A directory for sockets between the agent and QEMU.
    pub scratch: PathBuf,
    /// Downtime of moves from here that is not for pages.
    pub fixed_cost: Arc<FixedCost>,
    /// Where switchovers keep their journals.
    pub journals: JournalDir,
    /// Notes of VMs that are slowed by cgroups; none: by stopping them for
    /// moments.
    pub slowed: Option<quota::Notes>,
    /// The port that this agent listens at.
    pub agent_port: u16,
    /// How long its migrations wait for what.
    pub waits: Waits,
    /// Content that VMs have in common; none: each page is sent.
    pub sharing: Option<Arc<Sharing>>,
    /// Where migrations that somebody else commands may go here; none: nowhere.
    pub carrying: Option<Carrying>,
}

/// Where migrations that somebody else commands, such as libvirt, may go here.
#[derive(Clone, Debug)]
pub enum Carrying {
    /// To QEMUs that wait where every host has them.
    Host {
        /// The address at which they wait.
        address: IpAddr,
        /// And their ports.
        ports: std::ops::RangeInclusive<u16>,
        /// The directory in which they wait at sockets.
        directory: PathBuf,
    },
    /// To VMs of KubeVirt's, in their pods.
    Kubevirt(kubevirt::Node),
    /// To VMs of Proxmox VE.
    Proxmox(proxmox::Host),
}

impl Carrying {
    /// Whether a VM is to come to a place that another program leads to: one that its
    /// manager has made ready.
    #[must_use]
    pub fn expects(&self, target: &Target) -> bool {
        let found = match (self, target) {
            (Self::Kubevirt(node), Target::Vmi { uid, .. }) => {
                let found = uid.parse().and_then(|vmi| node.launcher(&vmi));
                found.map(|_| true).map_err(|error| error.to_string())
            }
            (Self::Proxmox(host), Target::Path(path)) => {
                let name = Path::new(path).strip_prefix(host.path()).ok();
                let waits = name.and_then(Path::to_str).map(|name| host.waits(name));
                waits.unwrap_or(Ok(false)).map_err(|error| error.to_string())
            }
            _ => Ok(false),
        };
        found.inspect_err(|error| tracing::debug!(?target, error, "expected")).unwrap_or(false)
    }
}

/// Downtime that is not for moving pages: device state, its load, `cont`.
/// Learned from each migration that leaves this host.
#[derive(Debug)]
pub struct FixedCost(AtomicU64);

/// Before one was measured: a small VM on an idle host takes half of it.
const FIXED_COST_FIRST: Duration = Duration::from_millis(60);

impl Default for FixedCost {
    fn default() -> Self {
        Self(AtomicU64::new(nanos(FIXED_COST_FIRST)))
    }
}

impl FixedCost {
    /// What to plan with.
    #[must_use]
    pub fn expected(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }

    /// One more was measured: up at once, down by and by, since a blackout
    /// that is too long is worse than one that was planned too carefully.
    pub(crate) fn learn(&self, measured: Duration) {
        let measured = nanos(measured);
        let expected = self.0.load(Relaxed);
        let next = if measured >= expected { measured } else { (expected * 3 + measured) / 4 };
        self.0.store(next, Relaxed);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The agent to migrate to.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Where its control connection goes.
    pub address: SocketAddr,
    /// Its data NICs, each reached at the port of `address`. Empty means that
    /// lanes go to `address` too.
    pub nics: Vec<IpAddr>,
}

/// Which NICs the `nth` lane uses: each in turn, at both ends.
pub(crate) fn lane_endpoint(local: &Local, peer: &Peer, nth: usize) -> Endpoint {
    let around = |nics: &[IpAddr]| nics.get(nth.checked_rem(nics.len())?).copied();
    let remote =
        around(&peer.nics).map_or(peer.address, |nic| SocketAddr::new(nic, peer.address.port()));
    Endpoint { local: around(&local.nics), remote }
}

/// The VM to move.
#[derive(Clone)]
pub struct SourceVm {
    /// Its name.
    pub name: String,
    /// Its QEMU.
    pub machine: Arc<Machine>,
    /// The directory that relative paths on its command line are meant from.
    pub cwd: String,
    /// Its sharing domain.
    pub share_domain: Domain,
}

/// Why a destination does not take a VM, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// What the destination side of a migration asks of its host.
pub trait Host: Send + Sync + 'static {
    /// Checks that the VM can come and makes a QEMU that waits for it, or says
    /// why not.
    ///
    /// # Errors
    /// With the reason; nothing is left behind.
    fn receive(&self, order: &wire::Prepare) -> Result<Box<dyn Arriving>, Refusal>;

    /// A switchover that is not over, and whose control connection is.
    fn settle(&self, left: Unsettled);

    /// A fault of ours has ended the thread of a VM that came: whose it is says
    /// only its journal now. Goes on from there as after a restart of the agent,
    /// unless there is none: then it was decided, and false is the answer.
    fn take_up(&self, vm: &str, migration: &MigrationId) -> bool;

    /// Somebody says or asks something about a switchover on a connection of
    /// its own; none if there is nothing to answer, now.
    fn answer(&self, inquiry: Inquiry) -> Option<Word>;

    /// Answers another agent that examines this host (see
    /// [`examine`](crate::examine)).
    fn examine(&self, question: Part<examine::Question>) -> examine::Answer {
        drop(question);
        examine::Answer::Unknown
    }

    /// Does what the agent of the host `from` orders (see
    /// [`Orders`](crate::Orders)), and answers. May take some seconds.
    ///
    /// # Errors
    /// If that agent may order nothing here.
    fn obey(&self, from: &str, order: &Part<gang::Order>) -> Result<gang::Answer, Refusal> {
        let _ = (from, order);
        Ok(gang::Answer::Unknown)
    }
}

/// The destination's side of a switchover that is not over: the VM is in doubt,
/// or the source has not heard all yet.
pub struct Unsettled {
    /// What decides.
    pub driver: Driver,
    /// The VM's QEMU.
    pub machine: Arc<Machine>,
    /// Its end of QEMU's migration.
    pub incoming: Option<Arc<Incoming>>,
    /// The VM, unless it is decided whose it is.
    pub arriving: Option<Box<dyn Arriving>>,
}

/// A VM that arrives. Dropped before [`Arriving::adopt`], it is discarded.
pub trait Arriving: Send {
    /// Its QEMU, which waits with `-incoming defer -S`.
    fn machine(&self) -> Arc<Machine>;

    /// The images of the disks that come with it, in the order of the source's
    /// list.
    fn images(&self) -> &[PreparedImage];

    /// Where the agent of the host that it comes from is found, if this host
    /// knows better than the connection says.
    fn source_address(&self) -> Option<SocketAddr>;

    /// It is this host's from now on, also after a restart of the agent.
    ///
    /// # Errors
    /// If the host can't note that down; the VM is here all the same. Then its
    /// journal stays, and this is asked again.
    fn adopt(&mut self) -> Result<(), String>;

    /// Its QEMU has said that it runs.
    fn runs(&self);

    /// Nothing more is to be said to its source: whoever wants can have it
    /// stopped or moved on.
    fn settled(self: Box<Self>);

    /// It doesn't come: ends QEMU and removes what was made for it.
    fn discard(self: Box<Self>);
}
