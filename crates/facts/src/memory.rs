//! A host's memory.

use serde::{Deserialize, Serialize};

/// Huge pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// How large each is.
    pub page_bytes: u64,
    /// How many there are, with those that the host would make on demand.
    pub total: u64,
    /// How many of them are neither used nor reserved.
    pub free: u64,
}

/// The current state of a host's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// Its total size.
    pub total_bytes: u64,
    /// Memory available without swapping; none if the kernel doesn't report it.
    pub available_bytes: Option<u64>,
    /// Free swap.
    pub swap_free_bytes: u64,
    /// The default size of huge pages.
    pub huge_default_bytes: u64,
    /// Huge pages, by size; sizes without any are left out.
    pub huge: Vec<HugePages>,
}
