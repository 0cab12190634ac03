//! Pages go straight into RAM that the agent made, or, where it made none,
//! through QEMU's own stream.

use std::process::{Child, Stdio};

use end_to_end::{Side, World, guest, own_qmp_argument};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};

const RATE: u64 = 5_000_000;

/// Starts a guest's QEMU as its owner would, without an agent.
fn start(world: &World, side: Side, spec: &GuestSpec, more: &[&str]) -> Child {
    let argv = spec.argv(&world.kit, &world.kit.qemu);
    let mut command = world.host(side).command(&argv[0]);
    command.args(&argv[1..]).args(own_qmp_argument(&spec.name)).args(more);
    command.stdin(Stdio::null()).spawn().unwrap()
}

fn attach(world: &World) {
    // QEMU has made its socket once this can be connected to.
    drop(world.own_qmp(Side::A, "web1"));
    world.says(Side::A, &["attach", "web1", "--qmp", &format!("{RUN_DIR}/web1.own")]);
}

#[test]
fn mapped_where_the_agents_started_both() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&guest("256M", RATE));
    assert_eq!(world.migrate(&guest, Side::A, &[]).placement, "mapped");
}

/// A VM that somebody else started, adopted by the agent. Its destination is
/// started by the agent.
#[test]
fn an_adopted_vm_moves_and_comes_back() {
    let world = World::new(Link::one(1000));
    let spec = guest("256M", RATE);
    let mut adopted = start(&world, Side::A, &spec, &[]);
    let guest = Guest::meet(spec, &world.hosts.a).unwrap();
    attach(&world);
    let vm = world.vm(Side::A, "web1").unwrap();
    assert_eq!((vm.attached, vm.pid), (true, adopted.id()));
    let moving = world.begin(&guest, Side::A, &[]);
    adopted.wait().unwrap();
    assert_eq!(world.arrive(&guest, Side::A, moving).placement, "mapped");
    assert!(!world.vm(Side::B, "web1").unwrap().attached);
    assert_eq!(world.migrate(&guest, Side::B, &[]).placement, "mapped");
}

/// Both QEMUs are somebody else's.
#[test]
fn into_a_qemu_that_somebody_else_started() {
    for tap in ["multifd", "classic"] {
        let world = World::new(Link::one(1000));
        let spec = guest("256M", RATE);
        let mut adopted = start(&world, Side::A, &spec, &[]);
        let guest = Guest::meet(spec.clone(), &world.hosts.a).unwrap();
        attach(&world);
        let mut waiting = start(&world, Side::B, &spec, &["-incoming", "defer", "-S"]);
        drop(world.own_qmp(Side::B, "web1"));
        let socket = format!("{RUN_DIR}/web1.own");
        let moving = world.begin(&guest, Side::A, &["--tap", tap, "--incoming-qmp", &socket]);
        adopted.wait().unwrap();
        let report = world.arrive(&guest, Side::A, moving);
        assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"));
        let vm = world.vm(Side::B, "web1").unwrap();
        assert_eq!((vm.pid, vm.attached), (waiting.id(), true));

        let moving = world.begin(&guest, Side::B, &["--tap", tap]);
        waiting.wait().unwrap();
        drop(world.arrive(&guest, Side::B, moving));
    }
}
