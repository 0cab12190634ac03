//! The host of a migration, as the engine sees it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::CpuFloor;
use content::Domain;
use dedup::destination::Sharing;
use host::quota;
use identity::Security;
use managers::Manager;
use parking_lot::Mutex;
use qemu::disks::{GoesOn, PreparedImage};
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::programs::Programs;
use qemu::ram_blocks::RamBlocks;
use switchover::MigrationId;
use switchover::destination::Driver;
use switchover::journal::JournalDir;
use transport::Endpoint;
use wire::{Inquiry, Part, SwitchoverMessage, examine, gang};

use crate::resources::Resources;
use crate::waits::Waits;
use crate::xen::{ArrivingDomain, XenHost};

/// This agent's settings and resources for migrations.
#[derive(Clone, Debug)]
pub struct Local {
    /// Its name.
    pub agent: String,
    /// How connections with other agents are secured.
    pub security: Security,
    /// The NICs that lanes use; if empty, routing decides.
    pub nics: Vec<IpAddr>,
    /// Resources that all its migrations share.
    pub resources: Arc<Resources>,
    /// QEMU programs that other hosts may start here, and the user that they run as.
    pub programs: Arc<Programs>,
    /// A directory for sockets between the agent and QEMU.
    pub scratch: PathBuf,
    /// Downtime of migrations from here that is not spent on pages.
    pub fixed_cost: Arc<FixedCost>,
    /// The journals of switchovers.
    pub journals: JournalDir,
    /// Notes of VMs that are throttled by cgroups; none: no VM is throttled.
    pub quota_notes: Option<quota::Notes>,
    /// The port at which this agent listens.
    pub agent_port: u16,
    /// The CPU floor of data threads of migrations that request none.
    pub cpu_floor: CpuFloor,
    /// Time limits of its migrations.
    pub waits: Waits,
    /// Deduplication; none: each page is sent.
    pub sharing: Option<Arc<Sharing>>,
    /// The program whose migrations are carried here; none: none are carried.
    pub manager: Option<Arc<dyn Manager>>,
    /// Domains of Xen; none: they neither leave nor arrive.
    pub xen: Option<Arc<XenHost>>,
}

/// Downtime that is not spent on pages: device state, its load, `cont`, and the round trips between
/// them. It is learned for each peer, from migrations that leave this host without disks: a flush at
/// the destination says nothing about other VMs.
#[derive(Debug, Default)]
pub struct FixedCost(Mutex<HashMap<String, LastCosts>>);

/// The last measured values, the latest first.
type LastCosts = [Duration; 5];

/// The initial value: a small VM on an idle host takes half of it.
const FIXED_COST_FIRST: Duration = Duration::from_millis(60);

impl FixedCost {
    /// The value to plan with for a migration to this peer.
    #[must_use]
    pub fn expected(&self, peer: &str) -> Duration {
        self.learned(peer).unwrap_or(FIXED_COST_FIRST)
    }

    /// The value that was learned for this peer.
    ///
    /// It is the second highest of the last values: a downtime that is too long is worse than one
    /// that was planned too cautiously, and a single move that was disturbed says nothing about the
    /// next.
    pub(crate) fn learned(&self, peer: &str) -> Option<Duration> {
        let mut last = *self.0.lock().get(peer)?;
        last.sort_unstable();
        Some(last[last.len() - 2])
    }

    /// Learns a measured value.
    pub(crate) fn learn(&self, peer: &str, measured: Duration) {
        let mut learned = self.0.lock();
        let last = learned.entry(peer.to_owned()).or_insert([FIXED_COST_FIRST; 5]);
        last.rotate_right(1);
        last[0] = measured;
    }
}

/// The agent to migrate to.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// The address of its control connection.
    pub address: SocketAddr,
    /// Its data NICs, each reached at the port of `address`. If empty, lanes go to `address` too.
    pub nics: Vec<IpAddr>,
}

/// The NICs of the `nth` lane, which take turns at both ends.
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
    /// The directory that relative paths on its command line refer to.
    pub cwd: String,
    /// Its sharing domain.
    pub share_domain: Domain,
    /// None: its RAM is sent. Otherwise its next QEMU on this host has mapped it as well.
    pub hand_over: Option<Arc<dyn HandOver>>,
}

/// What a migration within one host needs of it if the VM's RAM is handed over.
pub trait HandOver: Send + Sync {
    /// Keeps what of this RAM the next QEMU's load may write over, also for an agent that restarts.
    /// The VM stands still meanwhile.
    ///
    /// # Errors
    /// If it can't be kept: then nothing may be loaded.
    fn keep(&self, ram: &RamBlocks) -> Result<(), String>;

    /// Ends the next QEMU, and puts back what was kept, unless something else has ordered the
    /// former one to run the VM. Only then the former one may go on. May be called again.
    ///
    /// # Errors
    /// If the next QEMU may live, or RAM is not as it was.
    fn take_back(&self) -> Result<RamBack, String>;

    /// RAM is not as it was, although what was kept is put back: the former QEMU must never go on.
    fn changed(&self, why: &str);
}

/// RAM that was handed over, of a former QEMU that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RamBack {
    /// What was kept of it is as it was.
    PutBack,
    /// Something else had ordered that QEMU to run the VM, so it is as the guest and the next
    /// QEMU's load have left it: the pages that differ, for the operator.
    Ran(String),
}

/// Why a QEMU must not run a VM that a former one on this host has sent it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAlone {
    /// The former one lives although it was to end, or whether it runs the VM is not known.
    #[error("{0}")]
    MayLive(String),
    /// The former one runs, or has run: something else has ordered it to. It was not ended.
    #[error("{0}")]
    Runs(String),
    /// The same, and it was ended: what this QEMU has loaded is not the VM any more.
    #[error("{0}")]
    Ran(String),
}

/// Why a destination does not take a VM, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// What the destination's side of a migration needs from its host.
pub trait Host: Send + Sync + 'static {
    /// Checks that the VM can arrive and starts a QEMU that waits for it, or returns why it can't.
    /// A check that may take long calls `goes_on` to learn whether the source still waits.
    ///
    /// # Errors
    /// With the reason; nothing is left behind.
    fn receive(
        &self,
        order: &wire::Prepare,
        goes_on: GoesOn<'_>,
    ) -> Result<Box<dyn Arriving>, Refusal>;

    /// Takes over a switchover that is not over, but whose control connection is.
    fn settle(&self, left: Unsettled);

    /// Takes over the switchover of a domain of Xen that is not over, but whose control connection
    /// is. By default its journal is left for the next start.
    fn settle_domain(&self, left: UnsettledDomain) {
        drop(left);
    }

    /// The same after a panic of the domain's thread, from its journal.
    fn take_up_domain(&self, migration: &MigrationId) {
        tracing::error!(%migration, "a fault in the agent; the next start settles it");
    }

    /// Continues from the journal of a VM whose thread has panicked, as after a restart of the
    /// agent: only the journal tells whose VM it is. False if there is no journal, which means that
    /// the switchover was decided.
    fn take_up(&self, vm: &str, migration: &MigrationId) -> bool;

    /// Answers a message about a switchover that arrived on a connection of its own; none if there
    /// is nothing to answer now.
    fn answer(&self, inquiry: Inquiry) -> Option<SwitchoverMessage>;

    /// Whether the host that a certificate names may send VMs here, ask questions, and request
    /// content. All hosts of the cluster have certificates, also one that was removed.
    fn admits(&self, host: &str) -> bool;

    /// Answers another agent that examines this host (see
    /// [`examine`](crate::examine)).
    fn examine(&self, question: Part<examine::Question>) -> examine::Answer {
        drop(question);
        examine::Answer::Unknown
    }

    /// Follows an order of the agent of the host `from` (see [`Orders`](crate::Orders)), and
    /// answers. May take some seconds.
    ///
    /// # Errors
    /// If that agent may give no orders here.
    fn obey(&self, from: &str, order: &Part<gang::Order>) -> Result<gang::Answer, Refusal> {
        let _ = (from, order);
        Ok(gang::Answer::Unknown)
    }
}

/// The destination's side of a switchover that is not over: the VM is in doubt, or the source has
/// not received everything yet.
pub struct Unsettled {
    /// The state machine that decides.
    pub driver: Driver,
    /// The VM's QEMU.
    pub machine: Arc<Machine>,
    /// The incoming side of QEMU's migration.
    pub incoming: Option<Arc<Incoming>>,
    /// The VM, unless its fate is decided.
    pub arriving: Option<Box<dyn Arriving>>,
}

/// The same for a domain of Xen.
pub struct UnsettledDomain {
    /// The state machine that decides.
    pub driver: Driver,
    /// The domain.
    pub arriving: ArrivingDomain,
}

/// A VM that arrives. If it is dropped before [`Arriving::adopt`], it is discarded.
pub trait Arriving: Send {
    /// Its QEMU, which waits with `-incoming defer -S`.
    fn machine(&self) -> Arc<Machine>;

    /// What its report should note.
    fn notes(&self) -> &[String] {
        &[]
    }

    /// Whether its QEMU has mapped the RAM of the former one on this host: none of it is sent.
    fn maps_ram(&self) -> bool {
        false
    }

    /// Whether [`Arriving::be_alone`] ends a former QEMU on this host: it has the same RAM, or its
    /// taps.
    fn ends_former(&self) -> bool {
        self.maps_ram()
    }

    /// Called before its QEMU is ordered to run it: a former QEMU that has the same RAM, or the
    /// taps that it is to have, is ended.
    ///
    /// # Errors
    /// If it may live, or has run since; then this one must not run.
    fn be_alone(&self) -> Result<(), NotAlone> {
        Ok(())
    }

    /// The images of the disks that move with it, in the order of the source's list.
    fn images(&self) -> &[PreparedImage];

    /// The address of the source's agent, if this host knows a better one than that of the
    /// connection.
    fn source_address(&self) -> Option<SocketAddr>;

    /// Makes it this host's VM, also after a restart of the agent.
    ///
    /// # Errors
    /// If the host can't record that; the VM is here all the same. Then its journal stays, and this
    /// is called again.
    fn adopt(&mut self) -> Result<(), String>;

    /// Called in place of [`Arriving::adopt`] if it died before it was adopted: where its former
    /// QEMU is on the same host, that one may still have it.
    ///
    /// # Errors
    /// As [`Arriving::adopt`].
    fn lost(&mut self) -> Result<(), String> {
        self.adopt()
    }

    /// Called when its QEMU has reported that it runs.
    fn runs(&self);

    /// Called when its source needs no more messages: it can be stopped or moved on.
    fn settled(self: Box<Self>);

    /// Ends its QEMU, because it doesn't arrive, and removes what was made for it.
    fn discard(self: Box<Self>);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_cost_follows_what_is_usual_for_each_peer() {
        let ms = Duration::from_millis;
        let cost = FixedCost::default();
        assert_eq!((cost.expected("b"), cost.learned("b")), (FIXED_COST_FIRST, None));
        let after = |measured: u64| {
            cost.learn("b", ms(measured));
            cost.expected("b").as_millis()
        };
        assert_eq!(after(400), 60, "one move may have been disturbed");
        assert_eq!(after(30), 60);
        assert_eq!(after(400), 400, "so may two");
        assert_eq!([40, 30, 30, 35].map(after), [400, 400, 40, 40], "they are forgotten");
        assert_eq!([200, 220, 210].map(after), [40, 200, 210], "it has become slower");
        assert_eq!(cost.expected("c"), FIXED_COST_FIRST);
        for (measured, expected) in [(20, 60), (20, 60), (20, 60), (20, 20)] {
            cost.learn("c", ms(measured));
            assert_eq!(cost.expected("c"), ms(expected), "down gradually");
        }
    }
}
