//! A guest that writes is chased with a full pool behind QEMU's passes, and its downtime still
//! stays within the goal, whatever it does meanwhile.

use api::{Outcome, Phase, VmStatus};
use end_to_end::{MIB, Side, World, assert_fits_goal, bare, own_qmp_argument};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;
use serde_json::json;

/// Mbit/s.
const LINK: u32 = 200;
/// Bytes per second, more than the link carries.
const HARD: u64 = 60_000_000;

fn writer(rate: u64) -> GuestSpec {
    let mut spec = bare("256M", rate);
    spec.orders.working_set_bytes = 32 * MIB;
    spec
}

/// Moves it there by multifd and back by the classic stream; calls `meanwhile` while it is chased.
fn keeps_the_goal(rate: u64, meanwhile: impl Fn(&Guest)) {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&writer(rate));
    for (from, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
        guest.ask(&format!("rate {rate}")).unwrap();
        let mut moving = world.begin(&guest, from, &["--tap", tap]);
        moving.wait_for(Phase::LaterPass);
        meanwhile(&guest);
        let report = world.arrive(&guest, from, moving);
        assert_eq!(report.tap, tap);
        assert_fits_goal(&report, LINK);
    }
}

/// QEMU suddenly finds nothing dirty, with a second's worth in the pool.
#[runs(alone)]
#[test]
fn a_guest_that_stops_writing_abruptly() {
    keeps_the_goal(HARD, |guest| drop(guest.ask("rate 0").unwrap()));
}

#[runs(alone)]
#[test]
fn a_guest_that_is_faster_than_the_link_and_then_slows_down() {
    keeps_the_goal(HARD, |guest| drop(guest.ask("rate 10000000").unwrap()));
}

#[runs(alone, promised)]
#[test]
fn a_guest_that_writes_a_little_less_than_the_link_carries() {
    keeps_the_goal(18_000_000, |_| {});
}

#[test]
fn an_idle_guest() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&writer(0));
    for (from, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
        let report = world.migrate(&guest, from, &["--tap", tap]);
        assert_fits_goal(&report, LINK);
    }
}

/// QEMU does not hold a paused VM: it finishes with a full pool, and there is no downtime to bound.
#[test]
fn a_guest_that_its_owner_pauses() {
    let world = World::new(Link::one(LINK));
    for tap in ["multifd", "classic"] {
        let mut spec = writer(HARD);
        spec.name = format!("web-{tap}");
        spec.extra.extend(own_qmp_argument(&spec.name));
        let guest = world.boot(&spec);
        let mut moving = world.begin(&guest, Side::A, &["--tap", tap]);
        moving.wait_for(Phase::LaterPass);
        world.own_qmp(Side::A, &spec.name).execute("stop", json!({})).unwrap();
        let ended = moving.wait();
        assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
        assert_eq!(ended.report.downtime_ms, None);
        assert_eq!(world.vm(Side::B, &spec.name).unwrap().status, VmStatus::Paused);
        world.own_qmp(Side::B, &spec.name).execute("cont", json!({})).unwrap();
        world.assert_intact(&guest);
        world.says(Side::B, &["stop", &spec.name, "--force"]);
    }
}
