//! What a guest does at the host that it has moved to, after the move.

use end_to_end::{Side, World, guest, own_qmp_argument};
use lab::hosts::Link;
use lab::setup::{self, Qemu};
use marks::runs;
use serde_json::json;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
/// A card on which Linux announces itself after a migration.
const NIC: [&str; 4] =
    ["-netdev", "hubport,id=n0,hubid=0", "-device", "virtio-net-pci,netdev=n0,romfile="];

/// Reboots a guest so many moves after its last boot, by both kinds of stream. Its operating system
/// drives a network card, which the reboot resets.
fn reboots(choose: impl FnOnce(Vec<Qemu>) -> Option<Qemu>, depths: &[usize]) {
    let world = World::new(Link::one(1000));
    let qemu = choose(setup::qemus(&world.kit).unwrap()).unwrap();
    let mut spec = guest(ODD, RATE);
    spec.machine = qemu.machine();
    spec.initrd = Some(setup::nic_initrd(&world.kit).unwrap());
    spec.no_reboot = false;
    spec.extra.extend(NIC.map(str::to_owned));
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot_with(&spec, &qemu.program);
    let mut side = Side::A;
    let mut taps = ["multifd", "classic"].into_iter().cycle();
    for (nth, depth) in depths.iter().enumerate() {
        for tap in taps.by_ref().take(*depth) {
            assert_eq!(world.migrate(&guest, side, &["--tap", tap]).tap, tap);
            side = side.other();
        }
        let pid = world.vm(side, &spec.name).unwrap().pid;
        world.own_qmp(side, &spec.name).execute("system_reset", json!({})).unwrap();
        if let Err(error) = guest.wait_boots(u32::try_from(nth).unwrap() + 2) {
            let vm = world.vm(side, &spec.name);
            panic!("QEMU {}, {depth} moves deep: {error}\n{vm:?}", qemu.version);
        }
        let vm = world.vm(side, &spec.name).unwrap();
        assert_eq!(vm.pid, pid, "{vm:?}");
        world.assert_runs(side, &vm);
        world.assert_intact(&guest);
    }
}

#[test]
fn a_guest_reboots_in_the_oldest_qemu() {
    reboots(|all| all.into_iter().next(), &[2]);
}

#[runs(promised)]
#[test]
fn a_guest_reboots_in_the_newest_qemu() {
    reboots(|all| all.into_iter().next_back(), &[1, 2]);
}
