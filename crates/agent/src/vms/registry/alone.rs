//! One QEMU of a VM by itself, where two have mapped the same RAM, or are to have the same taps.

use std::sync::Arc;

use engine::HandOver;
use qemu::machine::{self, Machine};
use qemu::ram_blocks::RamBlocks;

use super::{Registry, Seat};
use crate::vms::ram_before;
use crate::vms::record::Record;

impl Registry {
    /// Ends every other QEMU of a VM than this one.
    pub(crate) fn end_besides(&self, name: &str, one: &machine::Record) -> Result<(), String> {
        let here = [self.vm(name), self.next(name)].into_iter().flatten();
        let here = here.filter_map(|vm| Some(vm.machine()?.record()));
        // One that this run of the agent has not reached yet is on disk.
        let dir = self.state().vm(name);
        let noted = [Record::read(&dir), Record::read_next(&dir)].into_iter().flatten();
        let all = here.chain(noted.filter_map(|record| record.machine));
        for other in all.filter(|other| !other.is_of(one)) {
            other.end().map_err(|error| error.to_string())?;
        }
        if self.may_live_besides(name, one) {
            return Err("another QEMU of the VM may live, and has its RAM or its taps".to_owned());
        }
        Ok(())
    }

    /// Ends the next QEMU of a VM, leaves the taps to the former one, and puts back what the load
    /// may have written to RAM.
    pub(crate) fn take_ram_back(&self, name: &str, former: &Machine) -> Result<(), String> {
        self.end_besides(name, &former.record())?;
        self.leave_taps(name, former);
        ram_before::put_back(&self.state().vm(name), former)
    }
}

impl Seat {
    /// Notes that its QEMU has mapped the former one's RAM.
    pub(crate) fn maps_ram(&mut self) {
        self.has_same_ram = true;
    }

    /// Ends the former QEMU, if both have the same RAM or its QEMU gets taps: these too.
    pub(crate) fn be_alone(&self) -> Result<(), String> {
        let machine = self.vm.as_ref().and_then(|vm| vm.machine());
        let machine = machine.ok_or_else(|| "its QEMU has ended".to_owned())?;
        if !self.has_same_ram && !machine.passes_taps() {
            return Ok(());
        }
        self.registry.be_alone(&self.name, &machine)
    }
}

/// A VM whose next QEMU maps its RAM.
pub(crate) struct HandedOver {
    registry: Arc<Registry>,
    name: String,
    former: Arc<Machine>,
}

impl HandedOver {
    pub(crate) fn new(registry: &Arc<Registry>, name: &str, former: Arc<Machine>) -> Self {
        Self { registry: Arc::clone(registry), name: name.to_owned(), former }
    }
}

impl HandOver for HandedOver {
    fn keep(&self, ram: &RamBlocks) -> Result<(), String> {
        ram_before::keep(&self.registry.state().vm(&self.name), ram)
    }

    fn take_back(&self) -> Result<(), String> {
        self.registry.take_ram_back(&self.name, &self.former)
    }

    fn changed(&self, why: &str) {
        ram_before::changed(&self.registry.state().vm(&self.name), why);
    }
}
