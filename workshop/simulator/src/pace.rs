//! Speed of hosts and agents in simulated time.

use super::cores::{Costs, Machines};
use super::placement::Placement;

/// All parameters of a gang but its network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// VMs that leave a host, and that arrive at one, at the same time.
    pub parallel: usize,
    /// How the hosts that VMs move to are chosen.
    pub placement: Placement,
    /// From a VM's turn until its first page is sent.
    pub prepare_s: f64,
    /// From its last page until it runs.
    pub switchover_s: f64,
    /// The downtime goal of each VM.
    pub goal_s: f64,
    /// Bytes that a migration's buffers hold.
    pub pool_bytes: f64,
    /// Rate at which a host can hash content of the VMs that leave it.
    pub naming_bytes_per_s: f64,
    /// Highest rate at which a VM's pages are handed over.
    pub vm_bytes_per_s: f64,
    /// Length of a step.
    pub step_s: f64,
    /// The cores of hosts.
    pub machines: Machines,
    /// The CPU time of work.
    pub costs: Costs,
}

/// Values for tests.
#[cfg(test)]
pub(super) fn example(machines: Machines) -> Pace {
    Pace {
        parallel: 16,
        placement: Placement::Turn,
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
