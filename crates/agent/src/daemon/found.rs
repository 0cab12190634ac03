//! The fourth step: the VMs that are here.

use std::sync::Arc;

use dedup::destination::Sharing;
use switchover::Kept;

use super::error::{AgentError, local_error};
use super::reserved::{Owned, Reserved};
use crate::config::Config;
use crate::moves::recovery::kept;
use crate::vms::holdings::Holdings;
use crate::vms::registry::Registry;
use crate::vms::scopes::Scopes;

/// This host's VMs are known. Whose those of unfinished switchovers are is still open.
pub(super) struct Found {
    pub(super) owned: Owned,
    pub(super) registry: Arc<Registry>,
    pub(super) kept: Vec<Kept>,
}

impl Reserved {
    pub(super) fn find_vms(self) -> Result<Found, AgentError> {
        let Self { owned, state, qemu_user, kept } = self;
        let registry = Registry::open(state, &kept::held(&kept));
        let registry = registry.map_err(|source| local_error("finding VMs", source))?;
        let registry = registry.with_qemu_user(qemu_user).with_scopes(Scopes::new());
        let holdings = holdings(&owned.config, owned.local.sharing.as_ref())?;
        let registry = Arc::new(registry.with_holdings(holdings));
        Ok(Found { owned, registry, kept })
    }
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
