//! RAM of any shape, and RAM that the guest never touched.

use std::fs;

use api::{Outcome, Phase};
use end_to_end::memory::HugePages;
use end_to_end::{MIB, Side, World, bare, guest, own_qmp_argument, until};
use lab::hosts::Link;
use marks::runs;
use serde_json::json;

#[test]
fn two_numa_backends() {
    let world = World::new(Link::one(1000));
    let kit = &world.kit;
    // QEMU 7.2 reports only the address of its first block: pages of the other go inline.
    let versions = [(&kit.qemu, kit.qemu_version), (&kit.qemu_system, kit.qemu_system_version)];
    for (qemu, version) in versions {
        let mut spec = bare("131080k", 5_000_000);
        spec.name = format!("numa-{}", qemu == &kit.qemu);
        spec.extra = [
            "-object memory-backend-ram,id=near,size=65540k",
            "-object memory-backend-ram,id=far,size=65540k",
            "-numa node,nodeid=0,memdev=near -numa node,nodeid=1,memdev=far",
        ]
        .iter()
        .flat_map(|line| line.split(' '))
        .map(str::to_owned)
        .collect();
        // The areas follow each other, and the second one lies in both blocks.
        spec.orders.random_bytes = 40 * MIB;
        spec.orders.working_set_bytes = 40 * MIB;
        let guest = world.boot_with(&spec, qemu);
        let report = world.migrate(&guest, Side::A, &[]);
        assert_eq!(report.placement, "mapped");
        let inline = report.notes.iter().any(|note| note.contains("`far` is placed inline"));
        assert_eq!(inline, version.major < 8, "{version}: {:?}", report.notes);
        world.says(Side::B, &["stop", &spec.name, "--force"]);
        world.assert_nothing_left(Side::B);
    }
}

/// RAM on both sides of the hole below 4 GiB, most of it untouched: it is allocated at neither end.
#[test]
fn untouched_memory_above_4_gib_stays_untouched() {
    let world = World::new(Link::one(200));
    let mut spec = guest("4352M", 15_000_000);
    // Linux uses the upper end first.
    spec.orders.working_set_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    let before = resident(&world, Side::A, "web1");
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::LaterPass);
    let read = resident(&world, Side::A, "web1");
    guest.ask("rate 1000000").unwrap();
    drop(world.arrive(&guest, Side::A, moving));
    let arrived = resident(&world, Side::B, "web1");
    let allowed = before + 128 * MIB;
    assert!(read < allowed, "the source took {read} bytes after {before}");
    assert!(arrived < allowed, "the destination took {arrived} bytes after {before}");
    assert!(allowed < 2048 * MIB, "{before} bytes are not little of 4352 MiB");
}

/// A guest that gives memory back, before and while it moves, and takes it again on the other host.
#[test]
fn a_guest_with_a_balloon() {
    let world = World::new(Link::one(200));
    let mut spec = guest("512M", 2_000_000);
    spec.orders.random_bytes = 96 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    spec.extra.extend(["-device", "virtio-balloon-pci"].map(str::to_owned));
    let guest = world.boot(&spec);
    let fill_to = |side, bytes: u64| {
        let qmp = world.own_qmp(side, "web1");
        qmp.execute("balloon", json!({ "value": bytes })).unwrap();
        until("the balloon has its size", || {
            qmp.execute("query-balloon", json!({})).unwrap()["actual"] == bytes
        });
    };
    fill_to(Side::A, 384 * MIB);
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    fill_to(Side::A, 320 * MIB);
    drop(world.arrive(&guest, Side::A, moving));
    let actual = world.own_qmp(Side::B, "web1").execute("query-balloon", json!({})).unwrap();
    assert_eq!(actual["actual"], 320 * MIB);
    // QEMU has 32 MiB of its own besides the guest's.
    let arrived = resident(&world, Side::B, "web1");
    assert!(arrived < (320 + 64) * MIB, "{arrived} bytes behind a VM that gave 192 MiB back");

    let mut moving = world.begin(&guest, Side::B, &[]);
    moving.wait_for(Phase::FirstPass);
    fill_to(Side::B, 512 * MIB);
    drop(world.arrive(&guest, Side::B, moving));
    let actual = world.own_qmp(Side::A, "web1").execute("query-balloon", json!({})).unwrap();
    assert_eq!(actual["actual"], 512 * MIB);
}

/// RAM in huge pages, which at first exist for the source alone.
#[runs(alone)]
#[test]
fn huge_pages() {
    const PAGES: u64 = 256 / 2;
    // Dropped after the world: its VMs need the pages until they are gone.
    let _pool = HugePages::reserve(PAGES);
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", 5_000_000);
    spec.machine += ",memory-backend=huge";
    let backend = "memory-backend-memfd,id=huge,size=256M,hugetlb=on,hugetlbsize=2M";
    spec.extra.extend(["-object", backend].map(str::to_owned));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let ended = world.begin(&guest, Side::A, &[]).wait();
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{}", ended.said) };
    assert!(why.contains("host-b refuses the VM") && why.contains("memory"), "{why}");
    world.remove_own_sockets(Side::B, "web1");
    world.assert_stayed(&guest, Side::A, pid);

    HugePages::set(2 * PAGES);
    for side in [Side::A, Side::B] {
        assert_eq!(world.migrate(&guest, side, &[]).placement, "mapped");
        let pid = world.vm(side.other(), "web1").unwrap().pid;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let huge = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:")).unwrap();
        assert!(!huge.trim().starts_with('0'), "{status}");
    }
}

/// Resident memory of a VM's QEMU, in bytes.
fn resident(world: &World, side: Side, name: &str) -> u64 {
    let pid = world.vm(side, name).unwrap().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
