//! What a VM's owner, or its guest, does to it while it moves.

use std::time::Duration;

use api::{Outcome, Phase, VmStatus};
use end_to_end::{Frozen, MIB, Side, World, bare, own_qmp_argument, until};
use lab::guest::GuestSpec;
use lab::hosts::Link;
use marks::runs;
use qemu::qmp::RunState;
use serde_json::json;

/// A guest whose move takes some seconds over a slow link.
fn slow_to_move() -> GuestSpec {
    let mut spec = bare("256M", 500_000);
    spec.orders.random_bytes = 64 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    spec
}

#[runs(promised)]
#[test]
fn a_paused_vm_arrives_paused() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", 5_000_000);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    world.own_qmp(Side::A, "web1").execute("stop", json!({})).unwrap();
    guest.expect_on(&world.hosts.b).unwrap();
    let ended = world.begin(&guest, Side::A, &[]).wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    assert_eq!(ended.report.downtime_ms, None);
    assert_eq!(world.vm(Side::B, "web1").unwrap().status, VmStatus::Paused);
    world.assert_nothing_left(Side::A);

    world.own_qmp(Side::B, "web1").execute("cont", json!({})).unwrap();
    world.assert_intact(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// Its owner pauses it during the move.
#[test]
fn a_vm_that_is_paused_while_it_moves_arrives_paused() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&slow_to_move());
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    world.own_qmp(Side::A, "web1").execute("stop", json!({})).unwrap();
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    assert_eq!(world.vm(Side::B, "web1").unwrap().status, VmStatus::Paused);
    world.own_qmp(Side::B, "web1").execute("cont", json!({})).unwrap();
    world.assert_intact(&guest);
}

/// And then the move is cancelled.
#[test]
fn a_vm_that_is_paused_while_it_moves_stays_paused_when_it_stays() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&slow_to_move());
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    world.own_qmp(Side::A, "web1").execute("stop", json!({})).unwrap();
    moving.interrupt();
    let ended = moving.wait();
    assert!(!ended.success, "{}", ended.said);
    assert_eq!(world.vm(Side::A, "web1").unwrap().status, VmStatus::Paused);
    world.own_qmp(Side::A, "web1").execute("cont", json!({})).unwrap();
    world.assert_intact(&guest);
    drop(world.migrate(&guest, Side::A, &[]));
}

#[runs(promised)]
#[test]
fn a_guest_reboots_while_it_moves() {
    let world = World::new(Link::one(200));
    let mut spec = slow_to_move();
    spec.no_reboot = false;
    let guest = world.boot(&spec);
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    guest.tell("reboot").unwrap();
    drop(world.arrive(&guest, Side::A, moving));
    guest.wait_boots(2).unwrap();
    world.assert_intact(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
    assert_eq!(guest.pulse().boots, 2);
}

#[test]
fn a_guest_that_powers_off_while_it_moves_is_gone() {
    let world = World::new(Link::one(200));
    let guest = world.boot(&slow_to_move());
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    guest.tell("poweroff").unwrap();
    let ended = moving.wait();
    assert!(!ended.success);
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report.outcome) };
    assert!(why.contains("the VM ended while it was being moved"), "{why}");
    world.assert_nothing_left(Side::B);
    world.wait_dead(Side::A, "web1");
    let problem = world.vm(Side::A, "web1").unwrap().problem.unwrap();
    assert!(problem.contains("the guest shut down"), "{problem}");
    world.says(Side::A, &["stop", "web1"]);
    world.assert_nothing_left(Side::A);
    assert!(guest.wait_beat(Duration::from_millis(100)).is_err());
}

/// Its QEMU was ordered to keep the VM, and keeps no settings of the move.
#[test]
fn a_guest_that_powers_off_while_it_moves_is_kept() {
    let world = World::new(Link::one(200));
    let mut spec = slow_to_move();
    spec.extra.push("-no-shutdown".to_owned());
    let guest = world.boot(&spec);
    let owners = world.own_qmp(Side::A, "web1");
    let asked = |command: &str| owners.execute(command, json!({})).unwrap();
    let before = asked("query-migrate-parameters");
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    assert_ne!(asked("query-migrate-parameters"), before);
    guest.tell("poweroff").unwrap();
    let ended = moving.wait();
    assert!(!ended.success, "{}", ended.said);
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report.outcome) };
    assert!(why.contains("the guest powered off while the VM was being moved"), "{why}");
    assert_eq!(asked("query-migrate")["status"], "cancelled");
    assert_eq!(asked("query-migrate-parameters"), before);
    assert_eq!(owners.run_state().unwrap(), RunState::Shutdown);
    assert_eq!(world.vm(Side::A, "web1").unwrap().status, VmStatus::Paused);
    world.assert_nothing_left(Side::B);
    world.says(Side::A, &["stop", "web1"]);
    world.remove_own_sockets(Side::A, "web1");
    world.assert_nothing_left(Side::A);
}

/// The guest's end is shown, though QEMU hangs.
#[test]
fn a_qemu_that_hangs_after_its_guest_shut_down() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("64M", 500_000);
    spec.extra.push("-no-shutdown".to_owned());
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    guest.tell("poweroff").unwrap();
    let shown = || world.vm(Side::A, "web1").unwrap();
    until("it has stopped", || shown().status == VmStatus::Paused);
    let hangs = Frozen::new(shown().pid);
    until("that is noticed", || shown().problem.is_some());
    let vm = shown();
    assert_eq!(vm.status, VmStatus::Paused);
    let problem = vm.problem.unwrap();
    assert!(problem.contains("the guest shut down, and QEMU (process "), "{problem}");
    assert!(problem.contains("neither answers nor ends"), "{problem}");
    // Its owner wants to keep it, so nothing asks it to end meanwhile.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(shown().status, VmStatus::Paused);
    drop(hangs);
    until("it answers again", || world.own_qmp(Side::A, "web1").run_state().is_ok());
    assert_eq!(shown().pid, vm.pid);
    world.says(Side::A, &["stop", "--force", "web1"]);
    world.remove_own_sockets(Side::A, "web1");
    world.assert_nothing_left(Side::A);
}
