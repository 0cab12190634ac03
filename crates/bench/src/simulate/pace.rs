//! How fast hosts and agents are in simulated time.

use super::cores::{Costs, Machines};

/// What of a gang is not the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// VMs that leave a host, and arrive at one, at a time.
    pub parallel: usize,
    /// From a VM's turn to its first page.
    pub prepare_s: f64,
    /// From its last page to its running.
    pub switchover_s: f64,
    /// What each may be gone for.
    pub goal_s: f64,
    /// What a migration's buffers hold.
    pub pool_bytes: f64,
    /// What a host can hash of the VMs that leave it.
    pub naming_bytes_per_s: f64,
    /// What one VM's pages come with at most.
    pub vm_bytes_per_s: f64,
    /// How long a step is.
    pub step_s: f64,
    /// Whose cores there are.
    pub machines: Machines,
    /// What work takes of them.
    pub costs: Costs,
}

/// For tests.
#[cfg(test)]
pub(super) fn example(machines: Machines) -> Pace {
    Pace {
        parallel: 16,
        prepare_s: 0.5,
        switchover_s: 0.1,
        goal_s: 0.3,
        pool_bytes: 8e6,
        naming_bytes_per_s: 1e9,
        vm_bytes_per_s: 600e6,
        step_s: 0.01,
        machines,
        costs: Costs::default(),
    }
}
