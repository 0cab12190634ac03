//! Content that VMs have in common crosses the network once, whatever happens to the VM that has
//! it; and only within a domain.

use api::{Outcome, Report};
use end_to_end::{MIB, Moving, Side, World};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;

/// Bytes of the same content in each VM, written with the same seed.
const COMMON: u64 = 48 * MIB;
const SHARE: [&str; 2] = ["--share", "host"];

fn twin(name: &str, rate: u64) -> GuestSpec {
    end_to_end::twin(name, "160M", COMMON, rate)
}

fn boot(world: &World, names: &[&str], rate: u64) -> Vec<Guest> {
    names.iter().map(|name| world.boot(&twin(name, rate))).collect()
}

fn arrived(moving: Moving) -> Report {
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    ended.report
}

/// Moves them one after the other.
fn follow(world: &World, guests: &[Guest], arguments: &[&[&str]]) -> Vec<Report> {
    let each = guests.iter().zip(arguments);
    each.map(|(guest, arguments)| arrived(world.begin(guest, Side::A, arguments))).collect()
}

#[runs(fills, promised)]
#[test]
fn what_a_vm_that_came_before_has_is_not_sent_again() {
    let (world, _certificates) = World::secured(Link::one(500));
    let guests = boot(&world, &["web1", "web2"], 0);
    let reports = follow(&world, &guests, &[&SHARE, &SHARE]);
    println!("{} {}", reports[0].named_bytes, reports[1].named_bytes);
    assert!(reports[1].named_bytes >= COMMON, "{:?}", reports[1]);
    assert!(reports[1].wire_bytes < reports[0].wire_bytes / 2);
    // Each VM is intact, also the one that was copied from.
    guests.iter().for_each(|guest| world.assert_intact(guest));
}

#[runs(fills)]
#[test]
fn vms_that_come_together_wait_for_one_another() {
    let world = World::new(Link::one(300));
    let guests = boot(&world, &["web1", "web2", "web3"], 200_000);
    let moving: Vec<_> = guests
        .iter()
        .map(|guest| world.begin(guest, Side::A, &["--compress", "off", "--share", "host"]))
        .collect();
    let reports: Vec<Report> = moving.into_iter().map(arrived).collect();
    let named: u64 = reports.iter().map(|report| report.named_bytes).sum();
    let sent: u64 = reports.iter().map(|report| report.wire_bytes).sum();
    println!("{named} by name, {sent} on the wire");
    assert!(named >= 2 * COMMON * 9 / 10, "{named} by name");
    guests.iter().for_each(|guest| world.assert_intact(guest));
}

/// The index says where a page was; the page that is there now has another name.
#[runs(fills)]
#[test]
fn a_vm_that_has_changed_its_pages_is_no_source_of_them() {
    let world = World::new(Link::one(500));
    let mut specs = ["web1", "web2"].map(|name| twin(name, 0));
    for spec in &mut specs {
        (spec.orders.random_bytes, spec.orders.text_bytes) = (0, 0);
        spec.orders.working_set_bytes = 32 * MIB;
    }
    let guests: Vec<Guest> = specs.iter().map(|spec| world.boot(spec)).collect();
    let first = arrived(world.begin(&guests[0], Side::A, &SHARE));
    guests[0].ask("rate 30000000").unwrap();
    let second = arrived(world.begin(&guests[1], Side::A, &SHARE));
    println!("{} {}", first.named_bytes, second.named_bytes);
    guests.iter().for_each(|guest| world.assert_intact(guest));
}

#[runs(fills, promised)]
#[test]
fn domains_never_meet() {
    let world = World::new(Link::one(500));
    let guests = boot(&world, &["web1", "web2", "web3"], 0);
    let reports = follow(
        &world,
        &guests,
        &[
            &["--share", "host", "--share-domain", "red"],
            &["--share", "host", "--share-domain", "blue"],
            &[],
        ],
    );
    // The last VM is in the cluster's own domain. Pages that a VM itself has twice are far fewer
    // than those in common.
    for report in &reports {
        assert!(report.named_bytes < COMMON / 2, "{}", report.named_bytes);
    }
    guests.iter().for_each(|guest| world.assert_intact(guest));
}
