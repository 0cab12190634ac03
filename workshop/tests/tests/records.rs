//! An agent's records of its VMs on disk are damaged, or can't be written: no VM ends by that.

use std::fs;
use std::path::{Path, PathBuf};

use api::{Outcome, Phase, VmStatus};
use end_to_end::faults::Traced;
use end_to_end::{MIB, Side, World, bare, own_qmp_argument, until};
use lab::guest::Guest;
use lab::hosts::Link;
use serde_json::{Value, json};

/// What the agent's list says of it, and how a record is damaged.
type Damage = (&'static str, fn(&Path));

fn record(world: &World, side: Side) -> PathBuf {
    world.host(side).run_dir.join("state/vms/web1/record.json")
}

fn journals(world: &World, side: Side) -> usize {
    let dir = world.host(side).run_dir.join("state/journals");
    fs::read_dir(dir).map_or(0, Iterator::count)
}

/// Damages the record of `web1` while no agent runs.
fn restart_with(world: &mut World, side: Side, damage: impl Fn(&Path)) {
    world.kill_agent(side);
    damage(&record(world, side));
    world.start_agent(side);
}

/// The VM is listed with the file and `says`, runs on, and can be neither stopped nor moved; then
/// it is adopted again as the list advises.
fn adopt_again(world: &World, guest: &Guest, side: Side, says: &str) {
    let pids = || {
        let agent = world.agent(side).pid();
        let mut pids = world.host(side).processes().unwrap();
        pids.retain(|pid| *pid != agent);
        pids
    };
    let vm = || world.vm(side, "web1").expect("it is listed");
    until("it is settled", || vm().status != VmStatus::InDoubt);
    assert_eq!(vm().status, VmStatus::Unreadable);
    let problem = vm().problem.unwrap_or_default();
    assert!(problem.contains("record.json") && problem.contains(says), "{problem}");
    let listed = world.tells(side, &["list"]);
    assert!(listed.contains("unreadable") && listed.contains(&problem), "{listed}");
    world.assert_intact(guest);
    for args in [&["migrate", "web1", side.other().name()][..], &["stop", "web1", "--force"]] {
        let why = world.refuses(side, args);
        assert!(why.contains("unreadable"), "{why}");
    }
    let running = world.refuses(side, &["resolve", "web1", "--there", "--yes"]);
    assert!(running.contains("never ends"), "{running}");
    let (_, socket) = problem.split_once("--qmp ").expect("it says which");
    let (socket, _) = socket.split_once('`').unwrap();
    world.says(side, &["attach", "web1", "--qmp", socket]);
    world.assert_stayed(guest, side, pids()[0]);
    assert_eq!(vm().problem, None);
}

#[test]
fn an_agent_leaves_a_vm_alone_whose_record_it_cannot_read() {
    let mut world = World::new(Link::one(1000));
    let guest = world.boot(&bare("192M", 2_000_000));
    let newer = |path: &Path| {
        let mut text: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        text["version"] = 7.into();
        text["standing"] = "elsewhere".into();
        fs::write(path, text.to_string()).unwrap();
    };
    let directory = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    };
    let damages: [Damage; 5] = [
        ("damaged", |path| fs::write(path, "{").unwrap()),
        ("damaged", |path| fs::write(path, "").unwrap()),
        ("newer", newer),
        ("directory", directory),
        ("there is no", |path| fs::remove_file(path).unwrap()),
    ];
    for (says, damage) in damages {
        restart_with(&mut world, Side::A, damage);
        adopt_again(&world, &guest, Side::A, says);
    }
    drop(world.migrate(&guest, Side::A, &[]));
}

#[test]
fn an_open_journal_goes_on_beside_a_record_that_cannot_be_read() {
    let mut world = World::new(Link::one(200));
    let mut spec = bare("256M", 2_000_000);
    spec.orders.random_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    for (says, text) in [("damaged", ""), ("newer", r#"{"version":7}"#)] {
        let mut moving = world.begin(&guest, Side::A, &[]);
        moving.wait_for(Phase::FirstPass);
        until("both have journals", || {
            [Side::A, Side::B].iter().all(|side| journals(&world, *side) > 0)
        });
        restart_with(&mut world, Side::A, |path| fs::write(path, text).unwrap());
        assert!(!moving.wait_any().0);
        adopt_again(&world, &guest, Side::A, says);
    }
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Its owner paused it, so only its record says which host owns it.
#[test]
fn an_arrival_that_cannot_be_noted_is_kept_by_its_journal() {
    let mut world = World::new(Link::one(200));
    let mut spec = bare("256M", 2_000_000);
    spec.orders.random_bytes = 64 * MIB;
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let vm = |world: &World| world.vm(Side::B, "web1").expect("it is there");
    world.own_qmp(Side::A, "web1").execute("stop", json!({})).unwrap();
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    let full = Traced::records_full(world.agent(Side::B).pid());
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    let shown = |world: &World| {
        let problem = vm(world).problem.unwrap_or_default();
        problem.contains("can't be written") && problem.contains("No space")
    };
    until("the operator sees why", || shown(&world));
    let pid = vm(&world).pid;
    assert_eq!((vm(&world).status, journals(&world, Side::B)), (VmStatus::Paused, 1));
    let standing = |world: &World| {
        let text = fs::read(record(world, Side::B)).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["standing"].clone()
    };
    assert_eq!(standing(&world), "arriving");

    world.kill_agent(Side::B);
    drop(full);
    world.start_agent(Side::B);
    until("it is noted", || standing(&world) == "here" && journals(&world, Side::B) == 0);
    let kept = vm(&world);
    assert_eq!((kept.pid, kept.status, kept.problem), (pid, VmStatus::Paused, None));
    world.kill_agent(Side::B);
    world.start_agent(Side::B);
    assert_eq!((vm(&world).pid, vm(&world).status), (pid, VmStatus::Paused));

    world.own_qmp(Side::B, "web1").execute("cont", json!({})).unwrap();
    world.assert_intact(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// The same, but space is freed while the agent runs on.
#[test]
fn what_cannot_be_noted_is_tried_again() {
    let world = World::new(Link::one(200));
    let mut spec = bare("256M", 2_000_000);
    spec.orders.random_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    let mut moving = world.begin(&guest, Side::A, &[]);
    moving.wait_for(Phase::FirstPass);
    let full = Traced::records_full(world.agent(Side::B).pid());
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    let vm = || world.vm(Side::B, "web1").expect("it is there");
    until("the operator sees why", || vm().problem.is_some());
    assert_eq!((vm().status, journals(&world, Side::B)), (VmStatus::Running, 1));
    drop(full);
    until("it is noted", || vm().problem.is_none() && journals(&world, Side::B) == 0);
    world.assert_moved(&guest, Side::A);
    world.assert_intact(&guest);
    drop(world.migrate(&guest, Side::B, &[]));
}

/// QEMU may crash when the guest reboots, and nothing but the record tells.
#[test]
fn vms_that_an_earlier_agent_has_moved_are_found() {
    let warns = |world: &World, side| {
        world.tells(side, &["doctor"]).contains("web1: an earlier Droveway moved it here")
    };
    let earlier = |path: &Path| {
        let mut text: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let machine = text["machine"].as_object_mut().unwrap();
        machine.remove("keeps_announce_timers").expect("this agent notes it");
        fs::write(path, text.to_string()).unwrap();
    };
    let mut world = World::new(Link::one(1000));
    let mut spec = bare("192M", 2_000_000);
    spec.extra.extend(["-device", "virtio-net-pci,romfile="].map(str::to_owned));
    let guest = world.boot(&spec);
    restart_with(&mut world, Side::A, earlier);
    assert!(!warns(&world, Side::A), "it was started there");
    drop(world.migrate(&guest, Side::A, &[]));
    assert!(!warns(&world, Side::B), "this agent moved it");
    restart_with(&mut world, Side::B, earlier);
    assert!(warns(&world, Side::B));
    drop(world.migrate(&guest, Side::B, &[]));
    assert!(!warns(&world, Side::A), "it was moved once more");
}
