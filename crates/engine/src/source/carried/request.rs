//! What the operator has set for migrations that other programs command.

use api::{Audit, Bounds, Compress, FromStorage, Sharing, Slowing};
use content::Domain;

/// The operator's settings for migrations that other programs command.
#[derive(Clone, Debug)]
pub struct CarryRequest {
    /// Number of lanes; by default as for the agent's own migrations.
    pub lanes: Option<u16>,
    /// The downtime goal, which bounds the data in flight.
    pub downtime_ms: u64,
    /// How bodies are encoded.
    pub compress: Compress,
    /// What the audit compares before the VM is loaded.
    pub audit: Audit,
    /// How far a VM that does not converge may be throttled. There is no deadline, and no
    /// action where the floor isn't enough.
    pub slowing: Slowing,
    /// The sharing domain.
    pub sharing: Sharing,
    /// Whether pages are read from disks that both hosts reach.
    pub storage: FromStorage,
    /// The bounds of each migration.
    pub bounds: Bounds,
}

impl CarryRequest {
    /// The sharing domain of all VMs carried from here.
    pub(super) fn domain(&self) -> Domain {
        Domain(self.sharing.domain.clone().unwrap_or_default())
    }
}

impl Default for CarryRequest {
    fn default() -> Self {
        Self {
            lanes: None,
            downtime_ms: 300,
            compress: Compress::default(),
            audit: Audit::default(),
            slowing: Slowing::default(),
            sharing: Sharing::default(),
            storage: FromStorage::default(),
            bounds: Bounds::default(),
        }
    }
}
