//! What the API's handlers use.

use std::sync::Arc;

use api::{ErrorCode, HostInfo, Progress, VmSummary};
use identity::Identity;

use super::metrics::CachedText;
use super::progress::Watchers;
use crate::denied::Denied;
use crate::events::Events;
use crate::examiner::Examiner;
use crate::gangs::Gangs;
use crate::moves::migrations::Migrations;
use crate::moves::recovery::Settlers;
use crate::peers::Peers;
use crate::vms::registry::Registry;
use crate::xen::DomainSettlers;

/// The parts of the agent that answer requests.
#[derive(Clone)]
pub(crate) struct Api {
    /// This host, without its peers.
    pub(crate) host: Arc<HostInfo>,
    pub(crate) peers: Peers,
    pub(crate) registry: Arc<Registry>,
    pub(crate) settlers: Arc<Settlers>,
    /// None: there are no domains of Xen.
    pub(crate) domains: Option<Arc<DomainSettlers>>,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) gangs: Arc<Gangs>,
    pub(crate) examiner: Arc<Examiner>,
    pub(crate) events: Arc<Events>,
    /// This host's certificate, if connections are encrypted.
    pub(crate) identity: Option<Arc<Identity>>,
    pub(crate) watchers: Watchers,
    /// The text of `/metrics`, at the API and at an address of its own.
    pub(crate) metrics: CachedText,
    /// Whether the agent is stopping.
    pub(crate) closing: tokio::sync::watch::Receiver<bool>,
}

impl Api {
    /// Refuses what would start something while the agent is stopping.
    pub(super) fn check_open(&self) -> Result<(), Denied> {
        if *self.closing.borrow() { Err(Denied::Closing) } else { Ok(()) }
    }

    /// The domains of Xen that are in doubt, shown as VMs.
    pub(super) fn domains_in_doubt(&self) -> Vec<VmSummary> {
        self.domains.as_ref().map(|domains| domains.in_doubt()).unwrap_or_default()
    }

    /// Adds to a refusal where the VM is, if it is known to be on another host.
    pub(super) fn located(&self, denied: Denied, vm: &str) -> Denied {
        if denied.code() != ErrorCode::NoSuchVm {
            return denied;
        }
        let hosts = self.gangs.hosts_of(vm);
        let location = if hosts.is_empty() {
            let Some(Progress { id, to, .. }) = self.migrations.last_that_moved(vm) else {
                return denied;
            };
            format!("migration {id} has moved it to {to}")
        } else {
            format!("it is at {}", hosts.join(" and at "))
        };
        let text = format!("there is no VM `{vm}` here: {location}. Run the command on that host");
        Denied::Coded(ErrorCode::NoSuchVm, text)
    }
}
