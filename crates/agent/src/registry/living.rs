//! The VMs whose QEMU can be asked.

use std::sync::Arc;

use qemu::machine::Machine;

use super::{Busy, Registry};

impl Registry {
    /// The VMs of this host whose QEMU lives, with their RAM; none that is only
    /// arriving.
    pub(crate) fn living(&self) -> Vec<(String, u64, Arc<Machine>)> {
        let slots = self.slots.lock();
        let here = slots.values().filter(|slot| !matches!(slot.busy, Busy::Arriving(_)));
        let vms = here.filter_map(|slot| slot.vm.as_ref());
        vms.filter_map(|vm| Some((vm.name.clone(), vm.ram_bytes(), vm.machine()?))).collect()
    }
}
