//! libvirt's migrations, carried by the agents of both hosts: classic and parallel, by
//! `virsh` and from libvirtd to libvirtd, over loopback and by sockets.

use end_to_end::disk::assert_disk_intact;
use end_to_end::field::{CarriedDomain, ROWS, Stream};
use end_to_end::libvirt::carried::Carried;
use end_to_end::{MIB, Side, bare, guest};
use lab::hosts::Link;
use lab::libvirt::{Disk, Domain, Migration};
use lab::setup::Qemu;
use marks::runs;

const RATE: u64 = 5_000_000;

/// By a loopback address or a socket; number of channels.
const WAYS: [(bool, Option<u8>); 4] =
    [(false, None), (false, Some(4)), (true, None), (true, Some(4))];

/// There and back in these ways, with one QEMU: the distribution's, or the newest that libvirt
/// knows.
fn by(ways: &[(bool, Option<u8>)], p2p: bool, is_oldest: bool) {
    with(&Carried::new(Link::one(1000)), ways, p2p, is_oldest);
}

fn with(carried: &Carried, ways: &[(bool, Option<u8>)], p2p: bool, is_oldest: bool) {
    let mut qemus = carried.world.qemus();
    let qemu = if is_oldest { qemus.swap_remove(0) } else { qemus.pop().unwrap() };
    // Under TCG QEMU 7.2 loses pages of a guest without an operating system, in each size that
    // libvirt gives it.
    let spec = if is_oldest { guest("256M", RATE) } else { bare("256M", RATE) };
    let guest = carried.world.start(&Domain::new(spec), &qemu);
    let sides = [Side::A, Side::B].into_iter().cycle();
    for (from, (by_path, parallel)) in sides.zip(ways) {
        let path = format!("unix:///run/droveway/migrate/{}.sock", from.other().name());
        let uri = by_path.then_some(path);
        let parallel = *parallel;
        carried.migrate(&guest, from, &Migration { p2p, parallel, uri, ..Migration::default() });
    }
}

/// There by loopback with four channels, back by a socket with one connection.
#[runs(promised)]
#[test]
fn there_and_back() {
    by(&[WAYS[1], WAYS[2]], false, false);
}

#[runs(requested)]
#[test]
fn by_virsh() {
    by(&WAYS, false, false);
}

#[runs(requested)]
#[test]
fn by_virsh_with_the_distributions_qemu() {
    by(&WAYS, false, true);
}

#[runs(requested)]
#[test]
fn from_libvirtd_to_libvirtd() {
    by(&WAYS, true, false);
}

#[runs(requested)]
#[test]
fn from_libvirtd_to_libvirtd_with_the_distributions_qemu() {
    by(&WAYS, true, true);
}

/// As during the upgrade of a cluster, host by host.
#[test]
fn between_two_releases_of_libvirt() {
    let carried = Carried::of_two_releases(Link::one(1000));
    with(&carried, &WAYS[..2], false, false);
}

/// Newer libvirts have QEMU wait until the destination permits it to stop the VM, which it does not
/// while the guest still writes too much.
#[test]
fn a_vm_of_the_newest_libvirt_is_stopped_when_little_is_left() {
    let carried = Carried::newest(Link::one(200));
    let world = &carried.world;
    let qemu = Qemu { program: world.kit.qemu.clone(), version: world.kit.qemu_version };
    let mut spec = bare("256M", 15_000_000);
    spec.orders.working_set_bytes = 32 * MIB;
    let guest = world.start(&Domain::new(spec), &qemu);
    for (from, parallel) in [(Side::A, Some(4)), (Side::B, None)] {
        carried.migrate(&guest, from, &Migration { parallel, ..Migration::default() });
        let notes = carried.report(from).notes;
        let waited = notes.iter().any(|note| note.contains("switchover-ack"));
        assert_eq!(waited, world.has_qemu_wait(&qemu), "{notes:?}");
    }
}

/// The same ways with a disk that only one host has, over two cards.
fn with_its_disk(p2p: bool, is_oldest: bool) {
    let carried = Carried::new(Link { nics: 2, mbit_per_s: Some(500) });
    let world = &carried.world;
    let mut qemus = world.qemus();
    let qemu = if is_oldest { qemus.swap_remove(0) } else { qemus.pop().unwrap() };
    let mut spec = guest("256M", RATE);
    spec.orders.disk_bytes = 32 * MIB;
    spec.orders.disk_rate = MIB;
    let mut domain = Domain::new(spec);
    let new_image = |side| Disk::make(world.host(side), "disk.img", "qcow2", 256 * MIB).unwrap();
    domain.disks = vec![new_image(Side::A)];
    let guest = world.start(&domain, &qemu);
    let sides = [Side::A, Side::B].into_iter().cycle();
    for (from, (by_path, parallel)) in sides.zip(WAYS) {
        let to = from.other();
        let _ = new_image(to);
        let path = |end: &str| format!("unix:///run/droveway/migrate/{}{end}.sock", to.name());
        let how = Migration {
            p2p,
            parallel,
            uri: by_path.then(|| path("")),
            copy_storage: true,
            disks_uri: by_path.then(|| path("-2")),
            ..Migration::default()
        };
        carried.migrate(&guest, from, &how);
        assert_disk_intact(&guest);
    }
}

#[runs(requested)]
#[test]
fn by_virsh_with_its_disk() {
    with_its_disk(false, false);
}

#[runs(requested)]
#[test]
fn by_virsh_with_its_disk_and_the_distributions_qemu() {
    with_its_disk(false, true);
}

#[runs(requested)]
#[test]
fn from_libvirtd_to_libvirtd_with_its_disk() {
    with_its_disk(true, false);
}

/// What an owner does with a domain after it was carried there and back; then it moves on.
#[test]
fn a_carried_domain_obeys_virsh() {
    let mut vm = CarriedDomain::moved(Stream::Classic, 2);
    for row in ROWS.iter().filter(|row| row.machine.is_none()) {
        if let Err(why) = vm.does(row) {
            panic!("{}: {why}", row.name);
        }
        vm.assert_lives();
    }
}
