//! The downtime stays within its goal, even if the first look at the link suggests that it is as
//! fast as memory: QEMU hands pages to the tap a hundred times faster than they leave.

use std::path::Path;

use end_to_end::{MIB, Side, World, assert_fits_goal, bare};
use lab::hosts::Link;
use marks::runs;

/// Mbit/s. Without a hold, the agents' buffers would take 5 s to drain.
const LINK: u32 = 100;
const POOL_MIB: u64 = 64;

fn keeps(qemu: &Path, memory: &str, goal_ms: u64) {
    let mut world = World::new(Link::one(LINK));
    world.restart_agents_with(&["--pool-mib", &POOL_MIB.to_string()]);
    let mut spec = bare(memory, 200_000);
    spec.orders.random_bytes = POOL_MIB * MIB;
    spec.orders.working_set_bytes = MIB;
    let guest = world.boot_with(&spec, qemu);
    let goal = goal_ms.to_string();
    for (from, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
        guest.forget_gap();
        let report = world.migrate(&guest, from, &["--downtime-ms", &goal, "--tap", tap]);
        assert_eq!(report.tap, tap);
        assert_fits_goal(&report, LINK);
        println!("felt {:?}", guest.pulse().gap);
    }
}

#[test]
fn with_a_qemu_that_is_told_the_bandwidth() {
    let kit = lab::setup::ensure().unwrap();
    keeps(&kit.qemu, "512M", 300);
}

/// QEMU 7.2 computes with its own estimate of the bandwidth. Under TCG, each of its looks at the
/// dirty bitmap takes 0.2 s on a guest that it moves correctly, so it gets more time.
#[runs(promised)]
#[test]
fn with_the_distributions_qemu() {
    let kit = lab::setup::ensure().unwrap();
    if kit.qemu_system_version.major == kit.qemu_version.major {
        println!("QEMU {} only: there is no other here", kit.qemu_version);
        return;
    }
    keeps(&kit.qemu_system, "524296k", 800);
}
