//! Whatever cancels a migration, and at any time: the VM goes on at its source, intact, and can be
//! moved again.

use api::{Outcome, Phase, Report};
use end_to_end::{Frozen, MIB, Moving, Side, World, bare, own_qmp_argument, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;
use qemu::qmp::RunState;

/// Writes more than the link carries, so its migration has no end.
fn busy() -> GuestSpec {
    let mut spec = bare("256M", 60_000_000);
    spec.orders.working_set_bytes = 32 * MIB;
    spec
}

fn cancelled(world: &World, guest: &Guest, pid: u32, moving: Moving) -> Report {
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    assert!(!ended.success);
    assert!(ended.said.contains("web1 continues at host-a"), "{}", ended.said);
    assert_eq!(ended.report.downtime_ms, None);
    world.assert_stayed(guest, Side::A, pid);
    ended.report
}

/// Cancels in each of these phases, then lets it move.
fn in_phases(phases: &[Phase], cancel: impl Fn(&World, &Moving)) {
    // A slow link, since on a busy host a guest writes more slowly than ordered.
    let world = World::new(Link::one(100));
    let guest = world.boot(&busy());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    for &phase in phases {
        let mut moving = world.begin(&guest, Side::A, &[]);
        moving.wait_for(phase);
        if phase == Phase::LaterPass {
            // The stale filter looks rarely at first, while it finds nothing.
            moving.wait_pass(3);
        }
        cancel(&world, &moving);
        let report = cancelled(&world, &guest, pid, moving);
        assert!(phase == Phase::FirstPass || report.passes > 1, "{}", report.passes);
        // The working set is rewritten twice a second.
        assert!(
            phase == Phase::FirstPass || report.dropped_bytes > 0,
            "the stale_filter found nothing"
        );
    }
    guest.ask("rate 1000000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}

#[runs(promised)]
#[test]
fn by_ctrl_c() {
    in_phases(&[Phase::FirstPass, Phase::LaterPass], |_, moving| moving.interrupt());
}

#[test]
fn by_another_command() {
    in_phases(&[Phase::FirstPass], |world, _| {
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

/// QEMU has stopped the VM, and its last pages are in flight, when the destination freezes.
#[test]
fn while_the_vm_is_stopped() {
    for tap in ["multifd", "classic"] {
        let world = World::new(Link::one(200));
        let guest = world.boot(&busy());
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let mut moving = world.begin(&guest, Side::A, &["--tap", tap, "--downtime-ms", "4000"]);
        moving.wait_for(Phase::Stopped);
        let frozen = Frozen::new(world.agent(Side::B).pid());
        moving.interrupt();
        let ended = moving.wait();
        drop(frozen);
        assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
        assert_eq!(ended.report.phases.last().unwrap().phase, Phase::Stopped);
        world.assert_stayed(&guest, Side::A, pid);
        guest.ask("rate 1000000").unwrap();
        drop(world.migrate(&guest, Side::A, &["--tap", tap]));
    }
}

/// Everything has arrived and the source's QEMU has finished, but the destination's QEMU hangs
/// while it loads.
#[test]
fn while_the_destination_loads() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", 1_000_000);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let owners = world.own_qmp(Side::A, "web1");
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    // Long enough to cancel it on a busy machine.
    let mut moving = world.begin(&guest, Side::A, &["--blackout-max", "60"]);
    moving.wait_for(Phase::FirstPass);
    let arriving = world.vm(Side::B, "web1").unwrap().pid;
    let frozen = Frozen::new(arriving);
    until("the source's QEMU is through", || owners.run_state().unwrap() == RunState::PostMigrate);
    moving.interrupt();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    until("what arrived is gone", || world.vms(Side::B).is_empty());
    drop(frozen);
    world.remove_own_sockets(Side::B, "web1");
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
}

/// A second Ctrl-C ends the wait. The migration is cancelled all the same.
#[test]
fn without_waiting_for_it() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&busy());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::LaterPass);
    // A frozen QEMU delays the end.
    let frozen = Frozen::new(pid);
    moving.interrupt();
    moving.wait_line("Cancelling");
    moving.interrupt();
    let (code, output, said) = moving.wait_status();
    assert_eq!((code, output.as_str()), (Some(130), ""), "{said}");
    assert!(said.contains("is being cancelled"), "{said}");
    drop(frozen);
    until("it is cancelled", || world.vm(Side::A, "web1").unwrap().migration.is_none());
    world.assert_stayed(&guest, Side::A, pid);
    guest.ask("rate 1000000").unwrap();
    drop(world.migrate(&guest, Side::A, &[]));
}

/// The command doesn't wait for an agent that doesn't answer, and doesn't claim that the agent got
/// the order.
#[test]
fn of_an_agent_that_does_not_answer() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&busy());
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::LaterPass);
    let id = world.vm(Side::A, "web1").unwrap().migration.unwrap();
    let frozen = Frozen::new(world.agent(Side::A).pid());
    moving.interrupt();
    moving.wait_line("Cancelling");
    moving.interrupt();
    let (code, _, said) = moving.wait_status();
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains(&format!("`droveway cancel {id}` tries again")), "{said}");
    drop(frozen);
    // The agent may have got the order after all.
    drop(world.agent(Side::A).command(&world.hosts.a, &["cancel", &id]).output().unwrap());
    until("it is cancelled", || world.vm(Side::A, "web1").unwrap().migration.is_none());
    world.assert_stayed(&guest, Side::A, pid);
}
