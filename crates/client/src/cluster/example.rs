//! Example answers of agents, for tests.

use api::{HostCensus, HostVm, Limit, Phase, Progress, VmStatus};
use report::example::example;

use super::Known;

/// A GiB.
pub const GIB: u64 = 1 << 30;

/// A migration in its first pass.
#[must_use]
pub fn moving(vm: &str) -> Progress {
    Progress {
        id: "deadbeef".to_owned(),
        vm: vm.to_owned(),
        from: "host-a".to_owned(),
        to: "host-b".to_owned(),
        phase: Phase::FirstPass,
        elapsed_s: 3.0,
        ram_bytes: GIB,
        percent: 41.0,
        delivered_bytes_per_s: 800e6,
        wire_bytes_per_s: 110e6,
        dirty_bytes_per_s: 5e6,
        share: 1.0,
        pass: 1,
        left_bytes: 600 << 20,
        disk_bytes: 0,
        disk_left_bytes: 0,
        time_left_s: Some(5.5),
        limit: Limit::Network,
        by_xl: false,
        waits_for: None,
        notes: Vec::new(),
        outcome: None,
        in_doubt: false,
    }
}

/// A host with these VMs.
#[must_use]
pub fn host(name: &str, vms: &[&str]) -> HostCensus {
    let vm = |name: &&str| HostVm {
        name: (*name).to_owned(),
        status: VmStatus::Running,
        migration: None,
        ram_bytes: GIB,
        used_bytes: GIB / 2,
        vcpus: 2,
        program_replaced: false,
    };
    HostCensus {
        name: name.to_owned(),
        rack: Some("r1".to_owned()),
        free_bytes: Some(8 * GIB),
        vms: vms.iter().map(vm).collect(),
        moving: Vec::new(),
    }
}

/// As [`known`], after the agent that is asked has ended, and host-b has been cut off.
#[must_use]
pub fn silent() -> Known {
    let mut known = known("web1");
    known.answers[0].problem = Some("no agent answers at /run/droveway/api.sock".to_owned());
    if let Some(host) = known.hosts.get_mut("host-b") {
        host.problem = Some("the agent of host-b can't be reached".to_owned());
    }
    known
}

/// Two hosts: one VM moves, another stays, and a third has moved.
#[must_use]
pub fn known(vm: &str) -> Known {
    let mut report = example();
    report.vm = vm.to_owned();
    let hosts = vec![host("host-a", &[vm, "web2"]), host("host-b", &[])];
    Known::example(hosts, vec![moving(vm)], Vec::new(), vec![report])
}
