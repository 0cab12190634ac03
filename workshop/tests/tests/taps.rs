//! Taps of a VM's network cards at its destination: a VM arrives offline only if that is accepted,
//! and then its report says so.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use api::Report;
use end_to_end::{Side, World, bare};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use marks::runs;

const RATE: u64 = 2_000_000;
const TAP: &str = "vmtap";
const BRIDGE: &str = "vmbr";

/// Changes a host's network.
fn ip(world: &World, side: Side, change: &str) {
    let done = world.host(side).command("ip").args(change.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {change}: {}", String::from_utf8_lossy(&done.stderr));
}

fn with_card(script: &str) -> GuestSpec {
    let mut spec = bare("256M", RATE);
    let tap = format!("tap,id=n0,ifname={TAP},script={script},downscript=no");
    let card = "virtio-net-pci,netdev=n0,romfile=".to_owned();
    spec.extra.extend(["-netdev".to_owned(), tap, "-device".to_owned(), card]);
    spec
}

/// What a report says of the tap.
fn notes(report: &Report) -> Vec<&str> {
    report.notes.iter().map(String::as_str).filter(|note| note.contains(TAP)).collect()
}

#[runs(promised)]
#[test]
fn one_that_leaves_the_vm_offline() {
    let world = World::new(Link::one(1000));
    let make = format!("tuntap add dev {TAP} mode tap");
    ip(&world, Side::A, &make);
    ip(&world, Side::A, &format!("link set {TAP} up"));
    let guest = world.boot(&with_card("no"));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let refused = |state: &str, finding: &str| {
        let why = world.refuses(Side::A, &["migrate", "web1", "host-b"]);
        assert!(why.contains(state) && why.contains("--accept-missing-taps"), "{why}");
        let found = world.refuses(Side::A, &["doctor", "host-b"]);
        assert!(found.contains(finding), "{found}");
    };
    refused("there is no tap vmtap", "the tap vmtap is missing at host-b");
    ip(&world, Side::B, &make);
    refused("the tap vmtap is down", "the tap vmtap is down at host-b");
    world.assert_stayed(&guest, Side::A, pid);

    let report = world.migrate(&guest, Side::A, &["--accept-missing-taps"]);
    let [note] = notes(&report)[..] else { panic!("{:?}", report.notes) };
    assert!(note.contains("is down at the destination"), "{note}");
    let report = world.migrate(&guest, Side::B, &[]);
    let [note] = notes(&report)[..] else { panic!("{:?}", report.notes) };
    assert!(note.contains("is on no bridge at the destination"), "{note}");

    for connected in [
        &[format!("addr add 192.0.2.1/32 dev {TAP}"), format!("link set {TAP} up")][..],
        &[
            format!("addr del 192.0.2.1/32 dev {TAP}"),
            format!("link add {BRIDGE} up type bridge"),
            format!("link set {TAP} master {BRIDGE}"),
        ],
    ] {
        connected.iter().for_each(|change| ip(&world, Side::B, change));
        let report = world.migrate(&guest, Side::A, &[]);
        assert_eq!(notes(&report), [""; 0], "{connected:?}");
        drop(world.migrate(&guest, Side::B, &[]));
    }
    ip(&world, Side::B, &format!("link set {BRIDGE} down"));
    refused("is down, or its bridge is", "is down at host-b, or its bridge is");
}

/// QEMU makes the tap, and runs a script that connects it, or doesn't.
#[test]
fn one_that_a_script_connects() {
    let dir = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let is_readable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(dir.path(), is_readable).unwrap();
    let connects = script("connects", &format!("ip link set \"$1\" master {BRIDGE} up"));
    let idles = script("idles", "true");
    let world = World::new(Link::one(1000));
    for side in [Side::A, Side::B] {
        ip(&world, side, &format!("link add {BRIDGE} up type bridge"));
    }
    let shown = |path: &Path| path.display().to_string();
    let guest = world.boot(&with_card(&shown(&connects)));
    let found = world.tells(Side::A, &["doctor", "host-b"]);
    assert!(!found.contains(TAP), "{found}");
    let report = world.migrate(&guest, Side::A, &[]);
    assert_eq!(notes(&report), [""; 0]);
    let set = format!("{}={}", shown(&connects), shown(&idles));
    let report = world.migrate(&guest, Side::B, &["--set", &set]);
    let [note] = notes(&report)[..] else { panic!("{:?}", report.notes) };
    assert!(note.contains("idles was run) is down at the destination"), "{note}");
}
