//! libvirt's own migrations, without Droveway: the basis of carried ones, and their comparison.

use end_to_end::disk::assert_disk_intact;
use end_to_end::libvirt::LibvirtWorld;
use end_to_end::{MIB, Side, assert_intact, bare, guest, until};
use lab::hosts::Link;
use lab::libvirt::{Disk, Domain, Memory, Migration};
use marks::runs;

const RATE: u64 = 5_000_000;

/// There by `how`, and back.
fn moves(how: &Migration, memory: Memory) {
    let world = LibvirtWorld::new(Link::one(1000));
    for qemu in world.qemus() {
        let mut domain = Domain::new(guest("256M", RATE));
        domain.memory = memory;
        let guest = world.start(&domain, &qemu);
        world.migrate(&guest, Side::A, how);
        world.migrate(&guest, Side::B, how);
        drop(world.virsh(Side::A, &["destroy", "web1"]));
    }
}

#[runs(requested)]
#[test]
fn classic() {
    moves(&Migration::default(), Memory::Default);
}

#[runs(requested)]
#[test]
fn parallel() {
    moves(&Migration { parallel: Some(4), p2p: true, ..Migration::default() }, Memory::SharedMemfd);
}

/// An abort in the middle leaves the guest where it was; then it can be moved.
#[runs(requested)]
#[test]
fn an_abort_leaves_the_guest_and_its_disk() {
    // 200 MiB take eight seconds.
    let world = LibvirtWorld::new(Link::one(200));
    let qemu = world.qemus().pop().unwrap();
    let mut spec = guest("256M", RATE);
    spec.orders.disk_bytes = 16 * MIB;
    spec.orders.disk_rate = MIB;
    let mut domain = Domain::new(spec);
    for host in [&world.hosts.a, &world.hosts.b] {
        domain.disks = vec![Disk::make(host, "disk.img", "qcow2", 256 * MIB).unwrap()];
    }
    let guest = world.start(&domain, &qemu);
    let how = Migration { copy_storage: true, ..Migration::default() };
    let mut migrating = world.begin(&guest, Side::A, &how);
    let (daemon, host) = (world.daemon(Side::A), world.host(Side::A));
    until("its disk is being copied", || {
        assert!(migrating.is_running(), "it is over");
        migrating.job(daemon, host).unwrap().contains_key("File processed")
    });
    migrating.abort(daemon, host).unwrap();
    let ended = world.end(migrating);
    assert!(!ended.success && ended.said.contains("abort"), "{}", ended.said);
    world.assert_only_at(&guest, Side::A);
    assert_intact(&guest);
    assert_disk_intact(&guest);
    world.migrate(&guest, Side::A, &how);
    assert_disk_intact(&guest);
}

/// A guest without an operating system is a domain, too.
#[runs(requested)]
#[test]
fn a_bare_guest() {
    let world = LibvirtWorld::new(Link::one(1000));
    let qemu = world.qemus().pop().unwrap();
    let guest = world.start(&Domain::new(bare("64M", RATE)), &qemu);
    world.migrate(&guest, Side::A, &Migration::default());
}
