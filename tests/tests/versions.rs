//! QEMU's version is not the same on all hosts, and never for long.

use std::path::Path;

use end_to_end::{Side, World, guest};
use lab::hosts::Link;
use lab::setup::Kit;

/// What QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "524296k";
const RATE: u64 = 2_000_000;

/// Starts with one QEMU, moves to the other and comes back, twice, with each of
/// QEMU's streams.
fn there_and_back(machine: &str, here: &Path, there: &Path) {
    let world = World::new(Link::one(1000));
    let mut spec = guest(ODD, RATE);
    machine.clone_into(&mut spec.machine);
    let guest = world.boot_with(&spec, here);
    let set = |from: &Path, to: &Path| format!("{}={}", from.display(), to.display());
    for tap in ["multifd", "classic"] {
        for (side, from, to) in [(Side::A, here, there), (Side::B, there, here)] {
            let set = set(from, to);
            let mut args = vec!["--tap", tap];
            if from != to {
                args.extend(["--set", &set]);
            }
            let report = world.migrate(&guest, side, &args);
            assert_eq!(report.tap, tap);
            assert_eq!(report.qemu[0] == report.qemu[1], from == to, "{:?}", report.qemu);
        }
    }
}

/// The distribution's QEMU and a newer one, where there are both.
fn both() -> Option<Kit> {
    let kit = lab::setup::ensure().unwrap();
    if kit.qemu_system_version.major == kit.qemu_version.major {
        println!("QEMU {} only: there is no other to move to", kit.qemu_version);
        return None;
    }
    Some(kit)
}

#[test]
fn the_newer_one_to_itself() {
    let kit = lab::setup::ensure().unwrap();
    there_and_back("q35", &kit.qemu, &kit.qemu);
}

#[test]
fn the_distributions_to_itself() {
    if let Some(kit) = both() {
        there_and_back("q35", &kit.qemu_system, &kit.qemu_system);
    }
}

#[test]
fn up_and_down_again() {
    if let Some(kit) = both() {
        // What both know: the older one's.
        let version = kit.qemu_system_version;
        let machine = format!("pc-q35-{}.{}", version.major, version.minor);
        there_and_back(&machine, &kit.qemu_system, &kit.qemu);
    }
}

/// The older QEMU doesn't know the newer one's machine: said before anything
/// moves.
#[test]
fn a_machine_that_the_destination_does_not_know() {
    let Some(kit) = both() else { return };
    let world = World::new(Link::one(1000));
    let guest = world.boot_with(&guest(ODD, RATE), &kit.qemu);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let set = format!("{}={}", kit.qemu.display(), kit.qemu_system.display());
    let why = world.refuses(Side::A, &["migrate", "web1", "host-b", "--set", &set]);
    assert!(why.contains("machine"), "{why}");
    world.assert_stayed(&guest, Side::A, pid);
}
