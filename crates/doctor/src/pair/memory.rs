//! Whether another host has memory for VMs.
//!
//! Ordinary memory and huge pages of each size are counted separately, because none of them can
//! replace another.

use std::collections::BTreeMap;

use facts::host::{Facts, VmFacts};
use facts::memory::HostMemory;
use qemu::room::{Needs, NoRoom};

use crate::{Findings, size};

/// What several VMs need of one kind of memory.
#[derive(Default)]
struct Taken {
    vms: usize,
    bytes: u64,
}

impl Taken {
    fn add(&mut self, bytes: u64) {
        if bytes > 0 {
            self.vms += 1;
            self.bytes = self.bytes.saturating_add(bytes);
        }
    }
}

/// Whether the host has memory for one VM.
pub(super) fn of_one(vm: &VmFacts, there: &Facts, findings: &mut Findings) {
    if there.memory == HostMemory::default() {
        // Its memory isn't known.
        return;
    }
    match needs(vm).fit(&there.memory, false) {
        Ok(()) => {}
        Err(NoRoom::Pages { needed, .. }) => findings.error(
            "vm",
            format!("{} has {} of RAM, more than {} has free.", vm.name, size(needed), there.host),
            "stop or move VMs there; --overcommit-memory moves it anyway",
        ),
        Err(NoRoom::Huge { page_bytes, needed, free }) => findings.error(
            "vm",
            format!(
                "{} takes {needed} huge pages of {} KiB, and {} has {free} free.",
                vm.name,
                page_bytes >> 10,
                there.host
            ),
            "give that host more (vm.nr_hugepages), or name another memory backend with --set",
        ),
    }
}

/// Whether the host has memory for all VMs together.
pub(super) fn of_all(here: &Facts, there: &Facts, findings: &mut Findings) {
    let memory = &there.memory;
    let Some(available) = memory.available_bytes else { return };
    let mut pages = Taken::default();
    let mut huge: BTreeMap<u64, Taken> = BTreeMap::new();
    for vm in &here.vms {
        let needs = needs(vm);
        pages.add(needs.pages_bytes);
        for (page_bytes, bytes) in needs.huge_bytes {
            huge.entry(page_bytes).or_default().add(bytes);
        }
    }
    let elsewhere = "move some of them elsewhere";
    let before = findings.list.len();
    if pages.vms > 1 && pages.bytes > available.saturating_add(memory.swap_free_bytes) {
        findings.warning(
            "memory",
            format!(
                "{} VMs of {} have {} of RAM, and {} has {} free: not all can go there.",
                pages.vms,
                here.host,
                size(pages.bytes),
                there.host,
                size(available)
            ),
            elsewhere,
        );
    }
    for (page_bytes, Taken { vms, bytes }) in huge {
        let needed = bytes.div_ceil(page_bytes.max(1));
        let there_are = memory.huge.iter().find(|huge| huge.page_bytes == page_bytes);
        let free = there_are.map_or(0, |huge| huge.free);
        if vms > 1 && needed > free {
            findings.warning(
                "memory",
                format!(
                    "{vms} VMs of {} take {needed} huge pages of {} KiB, and {} has {free} free: \
                     not all can go there.",
                    here.host,
                    page_bytes >> 10,
                    there.host
                ),
                elsewhere,
            );
        }
    }
    if findings.list.len() == before {
        findings.ok("memory", format!("{} has {} free.", there.host, size(available)));
    }
}

fn needs(vm: &VmFacts) -> Needs {
    Needs {
        pages_bytes: vm.pages_bytes.unwrap_or(vm.ram_bytes),
        huge_bytes: vm.huge_bytes.iter().copied().collect(),
    }
}

#[cfg(test)]
mod tests {
    use api::Severity;
    use facts::memory::HugePages;

    use super::*;

    const GIB: u64 = 1 << 30;
    const HUGE: u64 = 2 << 20;

    fn ordinary(name: &str, gib: u64) -> VmFacts {
        let (name, bytes) = (name.to_owned(), gib * GIB);
        VmFacts { name, ram_bytes: bytes, pages_bytes: Some(bytes), ..VmFacts::default() }
    }

    fn on_huge(name: &str, gib: u64, page_bytes: u64) -> VmFacts {
        let huge_bytes = vec![(page_bytes, gib * GIB)];
        VmFacts { pages_bytes: Some(0), huge_bytes, ..ordinary(name, gib) }
    }

    fn memory(gib: u64, huge_gib: u64) -> HostMemory {
        let free = huge_gib * GIB / HUGE;
        let huge = vec![HugePages { page_bytes: HUGE, total: free, free }];
        HostMemory { available_bytes: Some(gib * GIB), huge, ..HostMemory::default() }
    }

    /// The problems of moving these VMs from host a to host b.
    fn wrong(vms: &[VmFacts], memory: HostMemory) -> Vec<String> {
        let facts = |host: &str| Facts { host: host.to_owned(), ..Facts::default() };
        let here = Facts { vms: vms.to_vec(), ..facts("a") };
        let there = Facts { memory, ..facts("b") };
        let mut findings = Findings::of("a -> b");
        for vm in &here.vms {
            of_one(vm, &there, &mut findings);
        }
        of_all(&here, &there, &mut findings);
        let wrong = findings.list.into_iter().filter(|one| one.severity > Severity::Ok);
        wrong.map(|one| one.text).collect()
    }

    #[test]
    fn no_kind_of_memory_stands_in_for_another() {
        let none: [&str; 0] = [];
        let lacks_huge = ["web1 takes 2048 huge pages of 2048 KiB, and b has 1024 free."];
        assert_eq!(wrong(&[on_huge("web1", 4, HUGE)], memory(64, 2)), lacks_huge);
        let lacks_size = ["web1 takes 4 huge pages of 1048576 KiB, and b has 0 free."];
        assert_eq!(wrong(&[on_huge("web1", 4, GIB)], memory(64, 64)), lacks_size);
        let lacks_pages = ["web1 has 4096 MiB of RAM, more than b has free."];
        assert_eq!(wrong(&[ordinary("web1", 4)], memory(2, 64)), lacks_pages);
        assert_eq!(wrong(&[on_huge("web1", 4, HUGE)], memory(2, 4)), none);
        assert_eq!(wrong(&[on_huge("web1", 4, HUGE), ordinary("web2", 2)], memory(2, 4)), none);
        assert_eq!(wrong(&[on_huge("web1", 4, HUGE)], HostMemory::default()), none, "not known");
    }

    #[test]
    fn all_of_a_host_are_counted_by_kind() {
        let huge = [on_huge("web1", 4, HUGE), on_huge("web2", 4, HUGE), ordinary("web3", 2)];
        let together =
            ["2 VMs of a take 4096 huge pages of 2048 KiB, and b has 3072 free: not all can go \
             there."];
        assert_eq!(wrong(&huge, memory(4, 6)), together);
        let ordinary = [ordinary("web1", 2), ordinary("web2", 2), on_huge("web3", 4, HUGE)];
        let together =
            ["2 VMs of a have 4096 MiB of RAM, and b has 3072 MiB free: not all can go there."];
        assert_eq!(wrong(&ordinary, memory(3, 64)), together);
    }
}
