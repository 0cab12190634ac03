//! Agents end and start again; VMs don't notice.

use api::{Outcome, Phase, VmStatus};
use end_to_end::disk::{allocated_bytes, assert_still, image, mirrors, with_still_disk};
use end_to_end::faults::phase;
use end_to_end::{MIB, Moving, Side, World, bare, own_qmp_argument, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;
use qemu::qmp::Qmp;
use serde_json::{Value, json};

/// What the disk holds of a guest that has one.
const WRITTEN: u64 = 32 * MIB;

fn world() -> (World, Guest, u32) {
    let world = World::new(Link::one(200));
    let mut spec = bare("256M", 2_000_000);
    spec.orders.random_bytes = 64 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    (world, guest, pid)
}

/// QEMU's migration capabilities and parameters.
fn settings(qmp: &Qmp) -> [Value; 2] {
    ["query-migrate-capabilities", "query-migrate-parameters"]
        .map(|command| qmp.execute(command, json!({})).unwrap())
}

/// A migration in its first pass.
fn fly(world: &World, guest: &Guest) -> Moving {
    let mut moving = world.begin(guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    moving
}

#[runs(promised)]
#[test]
fn a_new_agent_finds_its_vm_and_moves_it() {
    let (mut world, guest, pid) = world();
    world.kill_agent(Side::A);
    world.assert_intact(&guest);
    world.start_agent(Side::A);
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
    world.kill_agent(Side::B);
    world.start_agent(Side::B);
    drop(world.migrate(&guest, Side::B, &[]));
}

#[runs(promised)]
#[test]
fn the_sources_agent_dies_while_pages_fly() {
    let (mut world, guest, pid) = world();
    let owners = world.own_qmp(Side::A, "web1");
    owners.execute("migrate-set-parameters", json!({ "downtime-limit": 777 })).unwrap();
    let before = settings(&owners);
    let moving = fly(&world, &guest);
    assert_ne!(settings(&owners), before);
    world.kill_agent(Side::A);
    let (moved, _, said) = moving.wait_any();
    assert!(!moved && said.contains("agent"), "{said}");
    world.assert_nothing_left(Side::B);
    world.start_agent(Side::A);
    until("QEMU's settings are back", || settings(&owners) == before);
    world.assert_stayed(&guest, Side::A, pid);
    assert_eq!(world.vm(Side::A, "web1").unwrap().problem, None);
    let listed = || world.migrations(Side::A);
    until("the move is in the history", || !listed().is_empty());
    let [ended] = listed().try_into().unwrap();
    let Some(Outcome::Failed(why)) = &ended.outcome else { panic!("{ended:?}") };
    assert!(why.contains("The VM stays where it was") && !ended.in_doubt, "{ended:?}");
    let log = world.agent(Side::A).log_text();
    assert!(log.contains(&format!("migration{{id={} vm=\"web1\"}}", ended.id)), "{log}");
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Its owner paused it before that: the next agent does not resume it.
#[test]
fn the_sources_agent_dies_while_a_paused_vm_moves() {
    let (mut world, guest, pid) = world();
    let owners = world.own_qmp(Side::A, "web1");
    let moving = fly(&world, &guest);
    owners.execute("stop", json!({})).unwrap();
    until("its journal says so", || phase(&world, Side::A) == "stopped / opened");
    world.kill_agent(Side::A);
    let (moved, _, said) = moving.wait_any();
    assert!(!moved && said.contains("agent"), "{said}");
    world.start_agent(Side::A);
    until("it is settled", || phase(&world, Side::A) == "- / -");
    let vm = world.vm(Side::A, "web1").unwrap();
    assert_eq!((vm.status, vm.pid, vm.problem), (VmStatus::Paused, pid, None));
    owners.execute("cont", json!({})).unwrap();
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Its QEMU was copying a disk: the next agent ends that, and nothing of it stays in QEMU, next to
/// the image or at the destination.
#[test]
fn the_sources_agent_dies_while_disk_blocks_fly() {
    let mut world = World::new(Link::one(100));
    let mut spec = with_still_disk(&world, WRITTEN);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let owners = world.own_qmp(Side::A, "web1");
    let before = settings(&owners);
    let args = ["--disks", "all", "--create-disks"];
    let mut moving = world.begin(&guest, Side::A, &args);
    moving.wait_for(Phase::FirstPass);
    until("blocks are written", || allocated_bytes(&world, Side::B) > MIB);
    world.kill_agent(Side::A);
    let (moved, _, said) = moving.wait_any();
    assert!(!moved && said.contains("agent"), "{said}");
    world.assert_intact(&guest);
    assert_ne!(mirrors(&owners), [""; 0]);
    world.start_agent(Side::A);
    until("nothing is left of the copy", || mirrors(&owners).is_empty());
    until("QEMU's settings are back", || settings(&owners) == before);
    world.assert_stayed(&guest, Side::A, pid);
    assert_eq!(world.vm(Side::A, "web1").unwrap().problem, None);
    assert_still(&image(&world, Side::A), WRITTEN);
    assert!(!image(&world, Side::B).exists(), "an image that was made for nothing");
    let beside = std::fs::read_dir(image(&world, Side::A).parent().unwrap()).unwrap();
    let names = beside.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with(".droveway")).count(), 0);
    drop(world.migrate(&guest, Side::A, &args));
    assert_still(&image(&world, Side::B), WRITTEN);
}

#[runs(promised)]
#[test]
fn the_destinations_agent_dies_while_pages_fly() {
    let (mut world, guest, pid) = world();
    let moving = fly(&world, &guest);
    world.kill_agent(Side::B);
    let ended = moving.wait();
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report.outcome) };
    assert!(!ended.success && why.contains("host-b"), "{why}");
    assert!(ended.said.contains("The VM stays where it was"), "{}", ended.said);
    world.start_agent(Side::B);
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
}
