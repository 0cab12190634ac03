//! A guest without an operating system moves there and back while it writes, with each machine
//! type.

use end_to_end::{MIB, Side, World, bare};
use lab::guest::GuestSpec;
use lab::hosts::Link;

const RATE: u64 = 10_000_000;

fn there_and_back(world: &World, spec: &GuestSpec) {
    let guest = world.boot(spec);
    for from in [Side::A, Side::B] {
        let before = guest.pulse().written.pages;
        let report = world.migrate(&guest, from, &[]);
        assert_eq!((report.tap.as_str(), report.placement.as_str()), ("multifd", "mapped"));
        let filled = spec.orders.random_bytes + spec.orders.working_set_bytes;
        assert!(report.body_bytes >= filled, "{}", report.body_bytes);
        assert!(guest.pulse().written.pages > before, "it does not write");
    }
    assert_eq!(guest.pulse().boots, 1);
}

#[test]
fn there_and_back_while_it_writes() {
    let world = World::new(Link::one(1000));
    there_and_back(&world, &bare("256M", RATE));
}

#[test]
fn of_the_older_machine() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.machine = "pc".to_owned();
    there_and_back(&world, &spec);
}

/// One vCPU speaks, the other writes.
#[test]
fn with_two_vcpus() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    (spec.vcpus, spec.orders.writer_cpu) = (2, 2);
    there_and_back(&world, &spec);
}

/// Otherwise the guest's check would be worth nothing.
#[test]
fn a_wrong_page_is_found_at_the_other_host_too() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&bare("256M", 0));
    guest.ask("spoil 1000").unwrap();
    let moving = world.begin(&guest, Side::A, &[]);
    let ended = moving.wait();
    assert!(ended.success, "{}", ended.said);
    let checked = guest.check().unwrap();
    assert_eq!((checked.pages, checked.wrong), (32 * MIB / 4096, 1), "{checked:?}");
    assert!(checked.first_wrong.starts_with("ws-page-1000-"), "{checked:?}");
}
