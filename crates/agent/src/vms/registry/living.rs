//! The VMs whose QEMU lives, and QEMUs that have none.

use std::sync::Arc;

use qemu::machine::Machine;

use super::Registry;
use super::slot::Busy;

/// A VM whose QEMU lives.
pub(crate) struct Living {
    pub(crate) name: String,
    pub(crate) ram_bytes: u64,
    pub(crate) machine: Arc<Machine>,
}

impl Registry {
    /// The VMs of this host whose QEMU lives, without those that are arriving.
    pub(crate) fn living(&self) -> Vec<Living> {
        let slots = self.slots.lock();
        let here = slots.values().filter(|slot| !matches!(slot.busy, Busy::Arriving { .. }));
        let vms = here.filter_map(|slot| slot.vm.as_ref());
        let living = vms.filter_map(|vm| {
            let (name, ram_bytes) = (vm.name.clone(), vm.ram_bytes());
            Some(Living { name, ram_bytes, machine: vm.machine()? })
        });
        living.collect()
    }

    /// What the operator has to know of QEMUs that upgrades left: one text for each.
    pub(crate) fn left_over(&self) -> Vec<String> {
        let slots = self.slots.lock();
        slots.values().filter_map(|slot| slot.vm.as_ref()?.left_over()).collect()
    }
}
