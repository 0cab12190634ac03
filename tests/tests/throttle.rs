//! A guest that writes faster than the link is slowed just enough, and never
//! stays slow.

use api::Outcome;
use end_to_end::{MIB, Side, World, guest};
use lab::guest::GuestSpec;
use lab::hosts::Link;

const GOAL_MS: f64 = 300.0;
/// Three times what the link carries.
const HARD: u64 = 70_000_000;

fn writer(rate: u64) -> GuestSpec {
    let mut spec = guest("256M", rate);
    spec.orders.working_set_bytes = 64 * MIB;
    spec
}

#[test]
fn a_guest_that_is_faster_than_the_link_comes_within_the_goal() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&writer(HARD));
    let report = world.migrate(&guest, Side::A, &[]);
    assert_eq!(report.outcome, Outcome::Done);
    println!(
        "{:?} {:?} {:?} total {} goal {GOAL_MS}",
        report.slowed, report.downtime_ms, report.predicted_downtime_ms, report.total_s
    );
    for s in report.samples.iter().step_by(4) {
        println!(
            "{:6.2} share {:.2} dirty {:6.1} deliv {:6.1} left {:6.1} pool {:.1}",
            s.at_s,
            s.share,
            s.dirty_bytes_per_s / 1e6,
            s.delivered_bytes_per_s / 1e6,
            s.left_bytes as f64 / 1e6,
            s.pool_bytes as f64 / 1e6
        );
    }
    for n in &report.notes {
        println!("{n}");
    }
}
