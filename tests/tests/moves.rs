//! A VM moves, and comes back, while it writes.

use api::TapChoice;
use end_to_end::{Side, World, guest};
use lab::hosts::Link;

const RATE: u64 = 10_000_000;

fn moves(tap: TapChoice) {
    let (arg, name) = match tap {
        TapChoice::Auto => ("auto", "multifd"),
        TapChoice::Multifd => ("multifd", "multifd"),
        TapChoice::Classic => ("classic", "classic"),
    };
    let world = World::new(Link::one(1000));
    let guest = world.boot(&guest("256M", RATE));
    let report = world.migrate(&guest, Side::A, &["--tap", arg]);
    assert_eq!((report.tap.as_str(), report.placement.as_str()), (name, "mapped"));
    assert_eq!((report.from.as_str(), report.to.as_str()), ("host-a", "host-b"));
    assert!(report.body_bytes >= 32 << 20, "{}", report.body_bytes);
}

#[test]
fn by_multifd_unless_told_otherwise() {
    moves(TapChoice::Auto);
}

#[test]
fn by_multifd() {
    moves(TapChoice::Multifd);
}

#[test]
fn by_the_classic_stream() {
    moves(TapChoice::Classic);
}

#[test]
fn there_and_back_ten_times() {
    let world = World::new(Link::unshaped());
    let guest = world.boot(&guest("256M", RATE));
    for _ in 0..10 {
        drop(world.migrate(&guest, Side::A, &[]));
        drop(world.migrate(&guest, Side::B, &[]));
    }
    assert_eq!(guest.pulse().boots, 1);
}
