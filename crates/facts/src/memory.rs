//! A host's memory.

use serde::{Deserialize, Serialize};

/// Huge pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// How large each is.
    pub page_bytes: u64,
    /// How many there are.
    pub total: u64,
    /// How many nobody has or was promised.
    pub free: u64,
}

/// A host's memory as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// All of it.
    pub total_bytes: u64,
    /// What can be had without swapping; none if the kernel does not say.
    pub available_bytes: Option<u64>,
    /// Swap that is free.
    pub swap_free_bytes: u64,
    /// How large a huge page is where nobody says.
    pub huge_default_bytes: u64,
    /// Huge pages, by size; sizes without any are left out.
    pub huge: Vec<HugePages>,
}
