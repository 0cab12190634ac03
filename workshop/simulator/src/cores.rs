//! CPUs in simulated time: the cores of each host, or of one machine that all hosts run on, and the
//! CPU time of work.

use serde::{Deserialize, Serialize};

/// A host saves at most this much unused time of its cores for later.
const SAVED_S: f64 = 0.02;

/// CPU time of work: in seconds of a core, and in nanoseconds per byte.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// A guest byte, zero or not, that QEMU scans and hands over.
    pub hand_over_ns: f64,
    /// A byte that is read from QEMU and passes through an agent's buffers.
    pub tap_ns: f64,
    /// A byte that is named.
    pub name_ns: f64,
    /// A byte that is compressed.
    pub encode_ns: f64,
    /// A byte that is expanded and placed.
    pub place_ns: f64,
    /// A byte that is found by its name, compared and placed.
    pub find_ns: f64,
    /// A byte on the wire, from socket to socket.
    pub wire_ns: f64,
    /// To start a VM's QEMU at its destination, and to end the other one.
    pub start_s: f64,
    /// The share of a core that a VM's vCPUs take all the time.
    pub vcpu_cores: f64,
    /// The share that the rest of its QEMU takes.
    pub vm_cores: f64,
    /// The share that its migration takes besides, at each end.
    pub moving_cores: f64,
}

impl Default for Costs {
    /// As measured on the machine of docs/benchmarks/method.md; docs/benchmarks/simulator.md says
    /// where each comes from.
    fn default() -> Self {
        Self {
            hand_over_ns: 0.33,
            tap_ns: 0.44,
            name_ns: 0.55,
            encode_ns: 0.55,
            place_ns: 1.1,
            find_ns: 1.65,
            wire_ns: 2.75,
            start_s: 0.11,
            vcpu_cores: 0.06,
            vm_cores: 0.03,
            moving_cores: 0.013,
        }
    }
}

impl Costs {
    /// QEMU's own precopy: nothing is named or compressed, and no agent is in between.
    #[must_use]
    pub fn of_precopy(self) -> Self {
        Self {
            tap_ns: 0.0,
            name_ns: 0.0,
            encode_ns: 0.0,
            place_ns: 0.0,
            find_ns: 0.0,
            start_s: 0.0,
            moving_cores: 0.0,
            ..self
        }
    }

    /// Whether all costs are possible.
    pub(super) fn are_right(&self) -> bool {
        [
            self.hand_over_ns,
            self.tap_ns,
            self.name_ns,
            self.encode_ns,
            self.place_ns,
            self.find_ns,
            self.wire_ns,
            self.start_s,
            self.vcpu_cores,
            self.vm_cores,
            self.moving_cores,
        ]
        .iter()
        .all(|cost| (0.0..1e6).contains(cost))
    }
}

/// The cores of hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Machines {
    /// So many that no work waits for one.
    Unlimited,
    /// Each host has this many.
    Each(f64),
    /// All hosts run on one machine, which has this many.
    One(f64),
}

/// The cores' time.
pub(super) struct Cores {
    machines: Machines,
    /// By machine; below 0 where more was spent than was available.
    left_s: Vec<f64>,
    pub(super) spent_s: f64,
}

impl Cores {
    pub(super) fn new(machines: Machines, hosts: usize) -> Self {
        let count = match machines {
            Machines::Unlimited => 0,
            Machines::Each(_) => hosts,
            Machines::One(_) => 1,
        };
        Self { machines, left_s: vec![0.0; count], spent_s: 0.0 }
    }

    fn machine(&self, host: usize) -> usize {
        if let Machines::One(_) = self.machines { 0 } else { host }
    }

    /// Adds the time of a step.
    pub(super) fn step(&mut self, step_s: f64) {
        let (Machines::Each(cores) | Machines::One(cores)) = self.machines else { return };
        for left_s in &mut self.left_s {
            *left_s = (*left_s + cores * step_s).min(cores * SAVED_S);
        }
    }

    /// Whether a host has time for work now.
    pub(super) fn has(&self, host: usize) -> bool {
        self.left_s.get(self.machine(host)).is_none_or(|left_s| *left_s > 0.0)
    }

    /// Takes time from a host's cores.
    pub(super) fn spend(&mut self, host: usize, seconds: f64) {
        self.spent_s += seconds;
        let machine = self.machine(host);
        if let Some(left_s) = self.left_s.get_mut(machine) {
            *left_s -= seconds;
        }
    }

    /// The same for so many bytes.
    pub(super) fn work(&mut self, host: usize, bytes: f64, ns: f64) {
        self.spend(host, bytes * ns / 1e9);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overspent_hosts_wait_and_idle_ones_save_little() {
        let mut cores = Cores::new(Machines::Each(2.0), 2);
        cores.step(0.01);
        assert!(cores.has(0) && cores.has(1));
        cores.work(0, 5e6, 10.0);
        assert!(!cores.has(0) && cores.has(1));
        cores.step(0.01);
        assert!(!cores.has(0));
        (0..100).for_each(|_| cores.step(0.01));
        assert!(cores.has(0));
        cores.spend(0, 2.0 * SAVED_S);
        assert!(!cores.has(0));
        assert!((cores.spent_s - 0.09).abs() < 1e-9);
    }

    #[test]
    fn hosts_of_one_machine_wait_for_each_other() {
        let mut one = Cores::new(Machines::One(2.0), 9);
        one.step(0.01);
        one.spend(8, 1.0);
        assert!(!one.has(0));
        let mut unlimited = Cores::new(Machines::Unlimited, 9);
        unlimited.spend(8, 1.0);
        assert!(unlimited.has(8));
    }

    #[test]
    fn omitted_costs_have_defaults() {
        let costs: Costs = serde_json::from_str(r#"{"wire_ns": 9}"#).unwrap();
        assert_eq!(costs, Costs { wire_ns: 9.0, ..Costs::default() });
        assert!(costs.are_right() && costs.of_precopy().are_right());
        assert!(!Costs { start_s: f64::NAN, ..costs }.are_right());
        assert!(serde_json::from_str::<Costs>(r#"{"wire": 9}"#).is_err());
    }
}
