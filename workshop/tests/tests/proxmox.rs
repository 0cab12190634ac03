//! VMs of Proxmox VE, moved as its `QemuMigrate.pm` moves them: by sockets in `/run/qemu-server`
//! that ssh makes at the source, without a return path, with xbzrle and auto-converge. Agents
//! replace ssh if both hosts have one.

use end_to_end::commander::{Commander, Way};
use end_to_end::disk::{assert_still, image, with_still_disk};
use end_to_end::proxmox::{Tunnel, directory, socket};
use end_to_end::{MIB, Side, World, assert_intact, bare, until};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab::setup;
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const MEMORY: &str = "262296k";
/// What the disk holds.
const WRITTEN: u64 = 16 * MIB;

fn start(link: Link, disk: bool) -> Commander {
    let kit = setup::ensure().unwrap();
    let world = World::new(link);
    for side in [Side::A, Side::B] {
        std::fs::create_dir_all(world.host(side).run_dir.join("qemu-server")).unwrap();
    }
    let spec = match disk {
        true => GuestSpec { memory: MEMORY.to_owned(), ..with_still_disk(&world, WRITTEN) },
        false => bare(MEMORY, 2_000_000),
    };
    let carry = format!("manager = \"proxmox\"\ndirectory = \"{}\"", directory());
    Commander::with(world, spec, &kit.qemu, ["", &carry])
}

fn way(commander: &Commander, disk: bool) -> Way {
    let uri = format!("unix:{}", socket(""));
    Way {
        uris: [uri.clone(), uri],
        // set_migration_caps sets these, and no others.
        more: vec!["xbzrle", "auto-converge"],
        without: vec!["return-path", "late-block-activate", "pause-before-switchover"],
        disk,
        disk_socket: Some(socket("_nbd")),
        ..commander.way(Side::A, true, 0)
    }
}

/// There and back, through the agents.
#[runs(promised)]
#[test]
fn what_ssh_would_forward_is_carried() {
    let mut commander = start(Link::one(1000), false);
    let way = way(&commander, false);
    for from in [Side::A, Side::B] {
        commander.expect(from, &way);
        let tunnel = Tunnel::open(&commander, from, &[""]);
        tunnel.wait_until_taken_over(&commander, from);
        commander.leave(from, &way);
        assert_eq!(commander.follow(from), "completed", "{}", commander.logs());
        let report = commander.arrive(from);
        assert_eq!((report.tap.as_str(), tunnel.connections()), ("relayed", 0), "{report:?}");
        assert!(report.notes.iter().any(|note| note.contains("return-path")), "{report:?}");
        drop(tunnel);
        until("nothing of it is left", || sockets(&commander, from).is_empty());
    }
}

#[test]
fn a_disk_goes_by_its_own_socket() {
    let mut commander = start(Link { nics: 2, mbit_per_s: Some(500) }, true);
    let way = way(&commander, true);
    commander.expect(Side::A, &way);
    let tunnel = Tunnel::open(&commander, Side::A, &["", "_nbd"]);
    tunnel.wait_until_taken_over(&commander, Side::A);
    commander.leave(Side::A, &way);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    drop(commander.arrive(Side::A));
    assert_eq!(tunnel.connections(), 0);
    assert_still(&image(&commander.world, Side::B), WRITTEN);
}

/// Without an agent at the other end, ssh forwards it as usual.
#[test]
fn without_an_agent_there_it_goes_by_ssh() {
    let mut commander = start(Link::one(1000), false);
    let way = way(&commander, false);
    commander.world.kill_agent(Side::B);
    commander.expect(Side::A, &way);
    let tunnel = Tunnel::open(&commander, Side::A, &[""]);
    commander.leave(Side::A, &way);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    assert_eq!(tunnel.connections(), 1);
    commander.run_there(Side::A);
    assert_intact(&commander.guest);
}

/// With OpenSSH itself: with a disk through the agents, and back by ssh.
#[runs(requested)]
#[test]
fn with_openssh_at_both_ends() {
    let mut commander = start(Link { nics: 2, mbit_per_s: Some(500) }, true);
    let way = way(&commander, true);
    for from in [Side::A, Side::B] {
        commander.expect(from, &way);
        if from == Side::B {
            commander.world.kill_agent(Side::A);
        }
        let tunnel = Tunnel::by_ssh(&commander, from, &["", "_nbd"]);
        if from == Side::A {
            tunnel.wait_until_taken_over(&commander, from);
        }
        commander.leave(from, &way);
        assert_eq!(commander.follow(from), "completed", "{}", commander.logs());
        match from {
            Side::A => drop(commander.arrive(from)),
            Side::B => commander.run_there(from),
        }
        assert_intact(&commander.guest);
        assert_still(&image(&commander.world, from.other()), WRITTEN);
        drop(tunnel);
    }
}

fn sockets(commander: &Commander, side: Side) -> Vec<String> {
    let entries = std::fs::read_dir(commander.world.host(side).run_dir.join("qemu-server"));
    let names = entries.unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains("migrate")).collect()
}
