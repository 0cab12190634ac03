//! Racks and hosts of a simulated cluster, and the links between them.

use super::links::Way;

/// Bytes on the wire per byte of content, with the headers of TCP, IP and Ethernet.
const OVERHEAD: f64 = 1.046;

/// A cluster: VMs move from the hosts of some racks to those of others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ground {
    /// Racks that VMs leave.
    pub source_racks: usize,
    /// Hosts in each of them.
    pub source_hosts: usize,
    /// Racks that VMs move to.
    pub target_racks: usize,
    /// Hosts in each of them.
    pub target_hosts: usize,
    /// Rate of a host's edge, in each direction.
    pub edge_bits_per_s: f64,
    /// Rate of a rack's link to the core, in each direction.
    pub core_bits_per_s: f64,
}

impl Ground {
    /// The lab's, with its usual links.
    pub(super) fn like_lab() -> Self {
        Self {
            source_racks: 2,
            source_hosts: 2,
            target_racks: 1,
            target_hosts: 2,
            edge_bits_per_s: 250e6,
            core_bits_per_s: 1e9,
        }
    }

    fn sources(&self) -> usize {
        self.source_racks * self.source_hosts
    }

    pub(super) fn targets(&self) -> usize {
        self.target_racks * self.target_hosts
    }

    /// All hosts: source hosts come first.
    pub(super) fn hosts(&self) -> usize {
        self.sources() + self.targets()
    }

    /// The rack of a target: target racks and their hosts are numbered from 0.
    pub(super) fn target_rack(&self, target: usize) -> usize {
        target / self.target_hosts
    }

    /// The nth VM's source: racks take turns, and so do the hosts of each.
    pub(super) fn source_of(&self, vm: usize) -> usize {
        let nth = vm % self.sources();
        nth % self.source_racks * self.source_hosts + nth / self.source_racks
    }

    /// The host that the nth VM moves to, among the targets.
    pub(super) fn target_of(&self, vm: usize) -> usize {
        let nth = vm % self.targets();
        nth % self.target_racks * self.target_hosts + nth / self.target_racks
    }

    fn rack(&self, host: usize) -> usize {
        match host.checked_sub(self.sources()) {
            None => host / self.source_hosts,
            Some(target) => self.source_racks + self.target_rack(target),
        }
    }

    /// Bytes of content per second that each link can carry.
    pub(super) fn capacities(&self) -> Vec<f64> {
        let edges = std::iter::repeat_n(self.edge_bits_per_s, 2 * self.hosts());
        let racks = self.source_racks + self.target_racks;
        let core = std::iter::repeat_n(self.core_bits_per_s, 2 * racks);
        edges.chain(core).map(|bits| bits / 8.0 / OVERHEAD).collect()
    }

    /// Bytes on the wire for so many bytes of content.
    pub(super) fn on_wire(bytes: f64) -> f64 {
        bytes * OVERHEAD
    }

    /// The links from a source to a target.
    pub(super) fn way(&self, source: usize, target: usize) -> Way {
        let target = self.sources() + target;
        let racks = 2 * self.hosts();
        let (up, down) = (racks + 2 * self.rack(source), racks + 2 * self.rack(target) + 1);
        Way::over(&[2 * source, up, down, 2 * target + 1])
    }

    /// The links between two targets of one rack.
    pub(super) fn way_within(&self, from: usize, to: usize) -> Way {
        Way::over(&[2 * (self.sources() + from), 2 * (self.sources() + to) + 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_are_dealt_to_racks_and_hosts_in_turn() {
        let ground = Ground {
            source_racks: 2,
            source_hosts: 2,
            target_racks: 1,
            target_hosts: 2,
            edge_bits_per_s: 8e6,
            core_bits_per_s: 32e6,
        };
        let sources: Vec<usize> = (0..5).map(|vm| ground.source_of(vm)).collect();
        assert_eq!(sources, [0, 2, 1, 3, 0]);
        assert_eq!((0..3).map(|vm| ground.target_of(vm)).collect::<Vec<_>>(), [0, 1, 0]);
        assert_eq!(ground.capacities().len(), 2 * 6 + 2 * 3);
        assert_eq!(ground.way(2, 1).links(), [4, 14, 17, 11]);
        assert_eq!(ground.way_within(0, 1).links(), [8, 11]);
    }
}
