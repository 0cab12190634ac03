//! Any number of lanes carries a VM, and the loss of one costs time, not data.

use api::{Phase, Report};
use end_to_end::disk::{allocated_bytes, assert_disk_intact, with_disk};
use end_to_end::{MIB, Moving, Side, World, bare, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

const TWO_NICS: Link = Link { nics: 2, mbit_per_s: Some(100) };

/// A guest whose move takes seconds.
fn large(world: &World) -> Guest {
    let mut spec = bare("384M", 200_000);
    spec.orders.random_bytes = 128 * MIB;
    world.boot(&spec)
}

/// A migration with one lane per NIC, with pages in flight.
fn fly(world: &World, guest: &Guest, from: Side) -> Moving {
    let mut moving = world.begin(guest, from, &["--lanes", "2"]);
    moving.wait_for(Phase::FirstPass);
    let before = world.hosts.traffic().unwrap().bytes;
    until("pages fly", || world.hosts.traffic().unwrap().bytes > before + 2 * MIB);
    moving
}

/// `ss` on A, for connections of its second NIC.
fn connections(world: &World, args: &[&str]) -> String {
    let output = world.hosts.a.command("ss").args(args).args(["src", "10.77.1.1"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn deaths(report: &Report) -> [u32; 2] {
    let on = |address: &str| {
        let lanes = report.lanes.iter().filter(|lane| lane.name.starts_with(address));
        lanes.map(|lane| lane.deaths).sum()
    };
    [on("10.77.0."), on("10.77.1.")]
}

#[runs(promised)]
#[test]
fn one_two_and_eight() {
    let world = World::new(Link { nics: 2, mbit_per_s: Some(500) });
    let guest = world.boot(&bare("256M", 5_000_000));
    let mut from = Side::A;
    for count in ["1", "2", "8"] {
        let report = world.migrate(&guest, from, &["--lanes", count]);
        assert_eq!(report.lanes.len().to_string(), count);
        let nic = |start: &str| report.lanes.iter().filter(|l| l.name.starts_with(start)).count();
        let (first, second) = (nic("10.77.0."), nic("10.77.1."));
        assert!(count == "1" || first == second, "{:?}", report.lanes);
        assert_eq!(deaths(&report), [0, 0]);
        from = from.other();
    }
}

/// A cable is pulled: neither end is notified.
#[test]
fn a_lane_whose_network_goes_silent() {
    let world = World::new(TWO_NICS);
    let guest = large(&world);
    let moving = fly(&world, &guest, Side::A);
    world.hosts.a.set_nic(1, false).unwrap();
    let report = world.arrive(&guest, Side::A, moving);
    // It counts once, however often the lane tried to reconnect.
    assert_eq!(deaths(&report), [0, 1], "{:?}", report.lanes);

    // The network is back, and so are both lanes.
    world.hosts.a.set_nic(1, true).unwrap();
    let report = world.migrate(&guest, Side::B, &["--lanes", "2"]);
    assert_eq!(deaths(&report), [0, 0]);
    assert!(report.lanes.iter().all(|lane| lane.batches > 0), "{:?}", report.lanes);
}

/// The network comes back after the lane was dropped, and before the end.
#[runs(promised)]
#[test]
fn a_lane_joins_again() {
    let world = World::new(TWO_NICS);
    let mut spec = bare("512M", 200_000);
    spec.orders.random_bytes = 256 * MIB;
    let guest = world.boot(&spec);
    let moving = fly(&world, &guest, Side::A);
    world.hosts.b.set_nic(1, false).unwrap();
    let established = ["-Htn", "state", "established"];
    until("the lane is given up", || connections(&world, &established).is_empty());
    world.hosts.b.set_nic(1, true).unwrap();
    until("the lane joins again", || !connections(&world, &established).is_empty());
    let report = world.arrive(&guest, Side::A, moving);
    assert_eq!(deaths(&report), [0, 1], "{:?}", report.lanes);
    let log = world.agent(Side::A).log_text();
    assert_eq!(log.matches("lane down").count(), 1, "{log}");
    assert_eq!(log.matches("lane up again").count(), 1, "{log}");
}

/// A firewall drops its connections: both ends are notified.
#[test]
fn a_lane_whose_connection_is_cut() {
    let world = World::new(TWO_NICS);
    let guest = large(&world);
    let moving = fly(&world, &guest, Side::A);
    drop(connections(&world, &["-Kt", "state", "established"]));
    let report = world.arrive(&guest, Side::A, moving);
    let [first, second] = deaths(&report);
    assert!(first == 0 && second > 0, "{:?}", report.lanes);
}

/// A lane with pages and blocks of a disk: what it had in flight of both goes by the other one, and
/// overlapping writes of the guest stay in order.
#[test]
fn a_lane_that_is_cut_with_disk_blocks_in_the_air() {
    let world = World::new(TWO_NICS);
    let mut spec = with_disk(&world, "raw", 1_500_000);
    spec.orders.random_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    let args = ["--lanes", "2", "--disks", "all", "--create-disks", "--compress", "off"];
    let mut moving = world.begin(&guest, Side::A, &args);
    moving.wait_for(Phase::FirstPass);
    until("blocks fly", || allocated_bytes(&world, Side::B) > MIB);
    drop(connections(&world, &["-Kt", "state", "established"]));
    until("more blocks fly", || allocated_bytes(&world, Side::B) > 8 * MIB);
    drop(connections(&world, &["-Kt", "state", "established"]));
    let report = world.arrive(&guest, Side::A, moving);
    let [first, second] = deaths(&report);
    assert!(first == 0 && second > 0, "{:?}", report.lanes);
    assert_disk_intact(&guest);
}
