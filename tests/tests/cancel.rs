//! Whoever cancels, and whenever: the VM goes on at its source, intact, and
//! can be moved again.

use api::{Outcome, Phase, Report};
use end_to_end::{MIB, Moving, Side, World, guest};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;

/// Writes more than the link carries: its migration has no end.
fn busy() -> GuestSpec {
    let mut spec = guest("256M", 60_000_000);
    spec.orders.working_set_bytes = 32 * MIB;
    spec
}

fn cancelled(world: &World, guest: &Guest, pid: u32, moving: Moving) -> Report {
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert!(!ended.success);
    assert!(ended.said.contains("web1 goes on at host-a"), "{}", ended.said);
    assert_eq!(ended.report.downtime_ms, None);
    world.assert_stayed(guest, Side::A, pid);
    ended.report
}

/// Cancels in each phase, then lets it move.
fn in_any_phase(cancel: impl Fn(&World, &Moving)) {
    let world = World::new(Link::one(200));
    let guest = world.boot(&busy());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    for phase in [Phase::FirstPass, Phase::LaterPass] {
        let mut moving = world.begin(&guest, Side::A, &[]);
        moving.wait_for(phase);
        cancel(&world, &moving);
        let report = cancelled(&world, &guest, pid, moving);
        assert!(phase == Phase::FirstPass || report.passes > 1, "{}", report.passes);
        // Its working set is written anew twice a second.
        assert!(phase == Phase::FirstPass || report.dropped_bytes > 0, "the sieve found nothing");
    }
    guest.ask("rate 1000000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}

#[test]
fn by_ctrl_c() {
    in_any_phase(|_, moving| moving.interrupt());
}

#[test]
fn by_another_command() {
    in_any_phase(|world, _| {
        let id = world.vm(Side::A, "web1").unwrap().migration.unwrap();
        world.says(Side::A, &["cancel", &id]);
    });
}

#[test]
fn of_the_classic_stream_and_before_anything_has_begun() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&busy());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    for phase in [Phase::Prepare, Phase::FirstPass, Phase::LaterPass] {
        let mut moving = world.begin(&guest, Side::A, &["--tap", "classic"]);
        moving.wait_for(phase);
        moving.interrupt();
        drop(cancelled(&world, &guest, pid, moving));
    }
    guest.ask("rate 1000000").unwrap();
    drop(world.migrate(&guest, Side::A, &["--tap", "classic"]));
}
