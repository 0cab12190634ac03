//! What the registry knows of one VM, and the memory that VMs have yet to take while they arrive.
//!
//! A QEMU that waits for its VM has hardly touched its memory, so the kernel reports that memory
//! as available.

use std::collections::BTreeMap;
use std::sync::Arc;

use qemu::machine::FormerTaps;

use crate::vms::vm::Vm;

/// The operation in progress on a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    Nothing,
    Starting,
    Arriving {
        /// The migration.
        id: String,
        /// The host that sends it.
        from: String,
    },
    Moving(String),
    Stopping,
    /// Its switchover, to or from this host, is unfinished: see `recovery`.
    Unsettled,
}

#[derive(Debug)]
pub(super) struct Slot {
    /// None until its QEMU answers.
    pub(super) vm: Option<Arc<Vm>>,
    pub(super) busy: Busy,
    /// The ordinary memory that is reserved for a VM that arrives, before its QEMU has answered.
    pub(super) promised: Option<u64>,
    /// Its next QEMU on this host, if it is getting one.
    pub(super) next: Option<Next>,
    /// Whether its QEMU gets what the former one had, and the VM is free after that.
    pub(super) takes_over: bool,
}

/// The QEMU on this host that is to have a VM.
#[derive(Debug, Default)]
pub(super) struct Next {
    /// The VM as it will be; none until that QEMU answers.
    pub(super) vm: Option<Arc<Vm>>,
    /// The ordinary memory that is reserved for it, before it has answered.
    pub(super) promised: Option<u64>,
    /// The taps of the former QEMU, until the next one gets them. If the former one exits first,
    /// they stay.
    pub(super) taps: Option<FormerTaps>,
}

impl Slot {
    /// A slot without a next QEMU.
    pub(super) fn new(vm: Option<Arc<Vm>>, busy: Busy) -> Self {
        Self { vm, busy, promised: None, next: None, takes_over: false }
    }

    /// The ordinary memory that its VM has yet to take if it is arriving, or gets another QEMU.
    pub(super) fn yet_to_take(&self) -> u64 {
        let next = self.next.as_ref();
        let next = next.map_or(0, |next| yet_to_take(next.vm.as_deref(), next.promised));
        match self.busy {
            Busy::Arriving { .. } => {
                next.saturating_add(yet_to_take(self.vm.as_deref(), self.promised))
            }
            _ => next,
        }
    }

    /// The migration that brings its VM here, if the VM arrives from this host.
    pub(super) fn arrives_from(&self, host: &str) -> Option<&str> {
        match &self.busy {
            Busy::Arriving { id, from } if from == host => Some(id),
            _ => None,
        }
    }

    /// Whether a QEMU of it is this process.
    pub(super) fn has(&self, pid: u32) -> bool {
        let next = self.next.as_ref().and_then(|next| next.vm.as_ref());
        let mut machines = self.vm.iter().chain(next).filter_map(|vm| vm.machine());
        machines.any(|machine| machine.process.pid() == pid)
    }
}

fn yet_to_take(vm: Option<&Vm>, promised: Option<u64>) -> u64 {
    // Once its QEMU has answered, more is known.
    let needed = vm.and_then(Vm::pages_bytes).or(promised);
    // For a QEMU that its operator started nothing was promised.
    let needed = needed.or_else(|| vm.map(Vm::ram_bytes));
    let machine = vm.and_then(Vm::machine);
    let taken = machine.and_then(|machine| engine::used_pages(machine.process.pid()));
    needed.unwrap_or(0).saturating_sub(taken.unwrap_or(0))
}

/// The ordinary memory that arriving VMs have yet to take, without the VM of that name.
pub(super) fn to_others(slots: &BTreeMap<String, Slot>, name: &str) -> u64 {
    let others = slots.iter().filter(|(other, _)| *other != name);
    others.map(|(_, slot)| slot.yet_to_take()).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::vms::record::{Record, Standing};

    const GIB: u64 = 1 << 30;

    /// A VM of 8 GiB whose QEMU has touched nothing.
    fn vm(pages_bytes: Option<u64>) -> Option<Arc<Vm>> {
        let record = Record::new(Standing::Arriving, None, 8 * GIB, "", "");
        let vm = Vm::lost("web1", PathBuf::from("/nowhere"), record, "it ended".to_owned());
        if let Some(bytes) = pages_bytes {
            vm.takes_pages(bytes);
        }
        Some(Arc::new(vm))
    }

    fn slot(vm: Option<Arc<Vm>>, promised: Option<u64>) -> Slot {
        let (id, from) = ("deadbeef".to_owned(), "host-a".to_owned());
        Slot { promised, ..Slot::new(vm, Busy::Arriving { id, from }) }
    }

    fn with_next(vm: Option<Arc<Vm>>, promised: Option<u64>) -> Slot {
        let next = Some(Next { vm, promised, taps: None });
        Slot { next, ..Slot::new(self::vm(None), Busy::Moving("deadbeef".to_owned())) }
    }

    #[test]
    fn an_arriving_vm_is_promised_what_is_known_best() {
        let cases = [
            (slot(None, None), 0, "it was not checked yet"),
            (slot(None, Some(2 * GIB)), 2 * GIB, "its QEMU has not answered"),
            (slot(vm(None), Some(2 * GIB)), 2 * GIB, "of 8 GiB, 6 are in huge pages"),
            (slot(vm(Some(3 * GIB)), Some(2 * GIB)), 3 * GIB, "its QEMU has answered"),
            (slot(vm(Some(0)), None), 0, "all of it is in huge pages"),
            (slot(vm(None), None), 8 * GIB, "its operator started its QEMU"),
            (Slot { busy: Busy::Nothing, ..slot(vm(None), Some(GIB)) }, 0, "it is here"),
            (with_next(None, Some(2 * GIB)), 2 * GIB, "its next QEMU has not answered"),
            (with_next(vm(Some(3 * GIB)), Some(2 * GIB)), 3 * GIB, "its next QEMU has answered"),
        ];
        for (slot, expected, why) in cases {
            assert_eq!(slot.yet_to_take(), expected, "{why}");
        }
    }
}
