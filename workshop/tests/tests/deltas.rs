//! Pages of which the guest changes little are sent as deltas: a guest that makes pages dirty
//! faster than the link carries them converges without throttling.

use api::{Phase, Prediction, Report};
use end_to_end::commander::Commander;
use end_to_end::{MIB, Side, World, bare};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::setup;
use marks::runs;

/// Rate of the link, in Mbit/s; and twice that in dirty pages, of each of which 64 bytes change.
const LINK: u32 = 100;
const DIRTIES: u64 = 25_000_000;

fn counter(name: &str) -> GuestSpec {
    let mut spec = bare("192M", DIRTIES);
    spec.name = name.to_owned();
    spec.orders.working_set_bytes = 32 * MIB;
    spec.orders.parts = true;
    spec
}

fn assert_went_as_deltas(report: &Report) {
    assert!(report.delta_bytes > MIB, "{report:?}");
    assert!(report.wire_bytes < report.body_bytes, "{report:?}");
}

#[runs(promised)]
#[test]
fn by_multifd_and_by_a_classic_stream() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&counter("web1"));
    for (from, args) in [(Side::A, &["--tap", "multifd"][..]), (Side::B, &["--tap", "classic"])] {
        let report = world.migrate(&guest, from, args);
        assert_went_as_deltas(&report);
    }
}

/// The prediction before the move knows of deltas, too.
#[test]
fn it_is_predicted_to_need_no_throttling() {
    let world = World::new(Link::one(LINK));
    let guest = world.boot(&counter("web1"));
    let rate = format!("{LINK}M");
    let told = world.tells(Side::A, &["predict", "web1", "host-b", "--rate", &rate, "--json"]);
    let predicted: Prediction = serde_json::from_str(&told).unwrap();
    assert!(predicted.dirty_bytes_per_s > predicted.delivered_bytes_per_s, "{predicted:?}");
    assert!(predicted.changed_share.is_some_and(|share| share < 0.3), "{predicted:?}");
    assert!(predicted.free.met && predicted.share == 1.0, "{predicted:?}");
    world.assert_intact(&guest);
}

/// By its commander's orders, and at the pace of its QEMU.
#[test]
fn of_a_vm_that_is_carried() {
    let program = setup::ensure().unwrap().qemu;
    let mut commander =
        Commander::with(World::new(Link::one(LINK)), counter("web1"), &program, ["", ""]);
    for (from, channels) in [(Side::A, 4), (Side::B, 0)] {
        let way = commander.way(from, false, channels);
        assert_went_as_deltas(&commander.migrate(from, &way));
    }
}

/// What a cut lane had in flight goes by the other one, and some of it twice.
#[test]
fn while_lanes_are_cut() {
    let world = World::new(Link { nics: 2, mbit_per_s: Some(LINK / 2) });
    let guest: Guest = world.boot(&counter("web1"));
    let mut moving = world.begin(&guest, Side::A, &["--lanes", "2", "--downtime-ms", "50"]);
    moving.wait_for(Phase::LaterPass);
    for _ in 0..3 {
        let cut = world.hosts.a.command("ss").args(["-Kt", "src", "10.77.1.1"]).output().unwrap();
        assert!(cut.status.success(), "{cut:?}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let report = world.arrive(&guest, Side::A, moving);
    assert_went_as_deltas(&report);
}
