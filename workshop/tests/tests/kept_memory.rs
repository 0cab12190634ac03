//! What agents keep of their guests in memory once a move has ended: nothing, however it went.

use std::fs::File;
use std::os::unix::fs::FileExt;

use end_to_end::commander::Commander;
use end_to_end::disk::{self, with_still_disk};
use end_to_end::memory::{guest_ram, ram_of};
use end_to_end::pattern::{self, assert_in, assert_in_no_agent};
use end_to_end::{MIB, Side, World, bare, own_qmp_argument};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use marks::runs;
use ram::Mapping;

const RATE: u64 = 2_000_000;
/// Of a guest whose memory agents reach: where it leaves its memory alone, and how much of that gets
/// the pattern.
const MEMORY_MIB: u64 = 256;
const FROM: u64 = 160 * MIB;
const PAGES: usize = 8192;
/// The same of a guest whose memory goes through QEMU's stream.
const INLINE_MIB: u64 = 20;
const INLINE_FROM: u64 = 14 * MIB;
const INLINE_PAGES: usize = 1024;

fn spec(mib: u64) -> GuestSpec {
    let mut spec = bare(&format!("{mib}M"), RATE);
    if mib == INLINE_MIB {
        (spec.orders.random_bytes, spec.orders.text_bytes) = (2 * MIB, 2 * MIB);
        spec.orders.working_set_bytes = 4 * MIB;
    }
    spec.extra.extend(own_qmp_argument(&spec.name));
    spec
}

/// Fills memory that a guest does not use with the pattern.
fn fill(ram: &Mapping, from: u64, pages: usize) {
    let content = pattern::pages(pages);
    let mut before = vec![1; content.len()];
    ram.read(from, &mut before).unwrap();
    assert!(before == vec![0; before.len()], "the guest uses it");
    ram.write(from, &content).unwrap();
    assert_in(ram.pid());
}

/// Moves a guest to and fro in these ways.
fn moves(world: &World, mib: u64, from: u64, pages: usize, ways: &[&[&str]]) {
    let guest = world.boot(&spec(mib));
    fill(&guest_ram(world, Side::A, &guest.spec.name, mib * MIB), from, pages);
    let mut side = Side::A;
    for way in ways {
        let report = world.migrate(&guest, side, way);
        assert_eq!(report.placement == "inline", mib == INLINE_MIB, "{}", report.placement);
        side = side.other();
        assert_in(world.vm(side, &guest.spec.name).unwrap().pid);
        assert_in_no_agent(world, &way.join(" "));
    }
}

#[runs(promised)]
#[test]
fn has_nothing_of_a_guest_that_has_moved() {
    let (world, _certificates) = World::secured(Link::one(1000));
    let ways: [&[&str]; 3] = [
        &["--tap", "multifd", "--compress", "off"],
        &["--tap", "classic", "--compress", "zstd"],
        &["--tap", "multifd", "--compress", "lz4", "--share", "host"],
    ];
    moves(&world, MEMORY_MIB, FROM, PAGES, &ways);
}

#[test]
fn has_nothing_of_a_guest_whose_pages_went_through_qemus_stream() {
    let world = World::new(Link::one(1000));
    let ways: [&[&str]; 2] = [&["--tap", "multifd"], &["--tap", "classic", "--compress", "off"]];
    moves(&world, INLINE_MIB, INLINE_FROM, INLINE_PAGES, &ways);
}

/// A move that was cancelled leaves no more than others.
#[test]
fn has_nothing_of_a_guest_that_has_stayed() {
    let world = World::new(Link::one(100));
    let guest = world.boot(&spec(MEMORY_MIB));
    let name = &guest.spec.name;
    fill(&guest_ram(&world, Side::A, name, MEMORY_MIB * MIB), FROM, PAGES);
    let pid = world.vm(Side::A, name).unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &["--compress", "off"]);
    moving.wait_for(api::Phase::FirstPass);
    moving.interrupt();
    assert!(!moving.wait().success);
    world.remove_own_sockets(Side::B, name);
    world.assert_stayed(&guest, Side::A, pid);
    assert_in_no_agent(&world, "cancelled");
}

#[test]
fn has_nothing_of_a_disk_that_has_moved() {
    let world = World::new(Link::one(1000));
    let spec = with_still_disk(&world, 4 * MIB);
    let image = disk::image(&world, Side::A);
    let at = 128 * MIB;
    File::options()
        .write(true)
        .open(image)
        .unwrap()
        .write_all_at(&pattern::pages(PAGES), at)
        .unwrap();
    let guest = world.boot(&spec);
    drop(world.migrate(&guest, Side::A, &["--disks", "all", "--create-disks"]));
    let mut arrived = vec![0; pattern::pages(1).len()];
    let image = File::open(disk::image(&world, Side::B)).unwrap();
    image.read_exact_at(&mut arrived, at).unwrap();
    assert!(arrived == pattern::pages(1), "the disk does not have it");
    assert_in_no_agent(&world, "a disk");
}

#[test]
fn has_nothing_of_a_guest_that_it_has_carried() {
    let world = World::new(Link::one(1000));
    let qemu = world.kit.qemu.clone();
    let mut commander = Commander::new(world, bare(&format!("{MEMORY_MIB}M"), RATE), &qemu);
    let source = commander.at(Side::A);
    fill(&ram_of(&source.qmp, source.pid(), MEMORY_MIB * MIB), FROM, PAGES);
    for (from, channels) in [(Side::A, 0), (Side::B, 4)] {
        let way = commander.way(from, false, channels);
        drop(commander.migrate(from, &way));
        assert_in(commander.at(from.other()).pid());
        assert_in_no_agent(&commander.world, &format!("carried by {channels} channels"));
    }
}
