//! An operator decides who owns a VM in doubt: with the other host fenced, it goes on here, or what
//! is left of it here is removed.

use std::time::Duration;

use api::{Phase, VmStatus};
use end_to_end::faults::{Traced, phase};
use end_to_end::{Moving, Side, World, bare, kill, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

/// Delay after a note in a journal.
const STEP: Duration = Duration::from_millis(1500);

/// A guest that moves from A to B, with one side's notes delayed, until the journals have reached
/// one of these phases.
struct Halfway {
    world: World,
    guest: Guest,
    moving: Moving,
    slow: Traced,
}

impl Halfway {
    fn new(slow: Side, phases: &[&str]) -> Self {
        let (world, _) = World::secured(Link::one(500));
        let guest = world.boot(&bare("192M", 2_000_000));
        let slow = Traced::slow(world.agent(slow).pid(), STEP);
        let mut moving = world.begin(&guest, Side::A, &["--blackout-max", "60"]);
        moving.wait_for(Phase::Stopped);
        let is_there = || phases.contains(&phase(&world, Side::A).as_str());
        until(&format!("the journals say {phases:?}"), is_there);
        Self { world, guest, moving, slow }
    }
}

/// As if the host had been switched off, with its disks intact.
fn fence(world: &mut World, side: Side) {
    let agent = world.agent(side).pid();
    let others = world.host(side).processes().unwrap();
    world.kill_agent(side);
    others.into_iter().filter(|pid| *pid != agent).for_each(kill);
}

/// Asserts that it is in doubt, with advice; half of a command decides nothing.
fn assert_in_doubt(world: &World, side: Side) {
    let vm = || world.vm(side, "web1").expect("it is held");
    until("it is in doubt", || vm().status == VmStatus::InDoubt && vm().problem.is_some());
    let problem = vm().problem.unwrap_or_default();
    assert!(problem.contains("droveway resolve web1"), "{problem}");
    let mut unsure = world.agent(side).command(world.host(side), &["resolve", "web1", "--here"]);
    let unsure = unsure.output().unwrap();
    let said = String::from_utf8_lossy(&unsure.stderr).into_owned();
    assert!(!unsure.status.success() && said.contains("--yes"), "{said}");
    assert_eq!(vm().status, VmStatus::InDoubt);
    for args in [&["migrate", "web1", side.other().name()][..], &["stop", "web1", "--force"]] {
        let why = world.refuses(side, args);
        assert!(why.contains("in doubt") || why.contains("not settled"), "{why}");
    }
}

/// Asserts that no journal is left anywhere, and no VM but at `side`, whose guest is intact and can
/// be moved.
fn assert_settled(world: &World, guest: &Guest, side: Side) {
    let journals = |side: Side| {
        let dir = world.host(side).run_dir.join("state/journals");
        std::fs::read_dir(dir).map_or(0, Iterator::count)
    };
    for side in [Side::A, Side::B] {
        until("no journal is left", || journals(side) == 0);
    }
    if world.vm(side.other(), "web1").is_some_and(|vm| vm.status == VmStatus::Dead) {
        world.says(side.other(), &["stop", "web1"]);
    }
    world.remove_own_sockets(side.other(), "web1");
    let vm = world.vm(side, "web1").expect("it is there");
    world.assert_stayed(guest, side, vm.pid);
    drop(world.migrate(guest, side, &[]));
}

/// The source has given the VM up, the destination's host is dead, and the source takes it back.
fn taken_back() -> (World, Guest) {
    let phases = ["committed / loaded", "committed / starting"];
    let Halfway { mut world, guest, moving, slow } = Halfway::new(Side::B, &phases);
    fence(&mut world, Side::B);
    drop(slow);
    let (moved, _, said) = moving.wait_any();
    assert!(!moved && said.contains("web1 is in doubt: ") && !said.contains("not moved"), "{said}");
    assert_in_doubt(&world, Side::A);
    // The lab has to listen to the guest here again.
    guest.expect_on(world.host(Side::A)).unwrap();
    let listed = || world.tells(Side::A, &["list", "--migrations"]);
    assert!(listed().contains("in doubt"), "{}", listed());
    world.says(Side::A, &["resolve", "web1", "--here", "--yes"]);
    assert_eq!(world.vm(Side::A, "web1").unwrap().status, VmStatus::Running);
    assert!(listed().contains("failed") && !listed().contains("in doubt"), "{}", listed());
    let ended = world.migrations(Side::A).remove(0);
    let report = world.tells(Side::A, &["report", &ended.id]);
    assert!(report.contains("was not moved to host-b: the operator"), "{report}");
    assert!(!report.contains("in doubt") && !report.contains("droveway resolve"), "{report}");
    world.assert_intact(&guest);
    (world, guest)
}

#[runs(promised)]
#[test]
fn the_source_takes_it_back() {
    let (mut world, guest) = taken_back();
    world.start_agent(Side::B);
    assert_settled(&world, &guest, Side::A);
}

/// The destination is not waited for, and comes back all the same.
#[test]
fn the_source_takes_it_back_for_good() {
    let (mut world, guest) = taken_back();
    let why = world.refuses(Side::A, &["migrate", "web1", Side::B.name()]);
    assert!(why.contains("droveway resolve web1 --here"), "{why}");
    world.says(Side::A, &["resolve", "web1", "--here", "--yes"]);
    until("the source has no journal", || phase(&world, Side::A).starts_with("- / "));
    world.start_agent(Side::B);
    assert_settled(&world, &guest, Side::A);
}

/// The VM runs at the destination, and the source is not notified.
#[test]
fn the_source_lets_it_go() {
    let phases = ["committed / loaded", "committed / starting"];
    let Halfway { world, guest, moving, slow } = Halfway::new(Side::B, &phases);
    world.hosts.lose_packets_of(world.host(Side::B)).unwrap();
    let (moved, ..) = moving.wait_any();
    assert!(!moved);
    drop(slow);
    assert_in_doubt(&world, Side::A);
    until("it runs there", || phase(&world, Side::A) == "committed / running");
    world.says(Side::A, &["resolve", "web1", "--there", "--yes"]);
    assert!(world.vm(Side::A, "web1").is_none());
    world.assert_intact(&guest);
    world.hosts.find_packets_of(world.host(Side::B)).unwrap();
    assert_settled(&world, &guest, Side::B);
}

/// The destination has loaded the VM, and the source's host is dead.
#[test]
fn the_destination_takes_it() {
    let phases = ["committed / loaded"];
    let Halfway { mut world, guest, moving, slow } = Halfway::new(Side::A, &phases);
    fence(&mut world, Side::A);
    drop(slow);
    drop(moving.wait_any());
    assert_in_doubt(&world, Side::B);
    world.says(Side::B, &["resolve", "web1", "--here", "--yes"]);
    assert_eq!(world.vm(Side::B, "web1").unwrap().status, VmStatus::Running);
    world.assert_intact(&guest);
    world.remove_own_sockets(Side::A, "web1");
    world.start_agent(Side::A);
    assert_settled(&world, &guest, Side::B);
}
