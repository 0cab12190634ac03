//! A Linux VM moves there and back while it writes, with each kind of stream.

use end_to_end::{Side, World, bare, guest};
use lab::hosts::Link;
use marks::runs;

const RATE: u64 = 10_000_000;

fn moves(tap: &str, by: &str) {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&guest("256M", RATE));
    let report = world.migrate(&guest, Side::A, &["--tap", tap]);
    assert_eq!((report.tap.as_str(), report.placement.as_str()), (by, "mapped"));
    assert_eq!((report.from.as_str(), report.to.as_str()), ("host-a", "host-b"));
    assert!(report.body_bytes >= 32 << 20, "{}", report.body_bytes);
    let span = format!("migration{{id={} vm=\"web1\"}}", report.id);
    for side in [Side::A, Side::B] {
        let log = world.agent(side).log_text();
        let of_migration: Vec<&str> =
            log.lines().filter(|line| line.contains("engine::")).collect();
        assert!(!of_migration.is_empty(), "{log}");
        // The span of a lane's thread is not nested in itself.
        let once = |line: &&str| line.matches(&span).count() == 1;
        let other: Vec<_> = of_migration.iter().filter(|line| !once(line)).collect();
        assert!(other.is_empty(), "{} logs without {span}: {other:?}", side.name());
    }
}

#[runs(promised)]
#[test]
fn by_multifd_unless_told_otherwise() {
    moves("auto", "multifd");
}

#[runs(promised)]
#[test]
fn by_the_classic_stream() {
    moves("classic", "classic");
}

#[test]
fn there_and_back_twice() {
    let world = World::new(Link::unshaped());
    let guest = world.boot(&bare("256M", RATE));
    for _ in 0..2 {
        drop(world.migrate(&guest, Side::A, &[]));
        drop(world.migrate(&guest, Side::B, &[]));
    }
    assert_eq!(guest.pulse().boots, 1);
}
