//! Pages go straight into RAM that the agent made, or, where it made none,
//! through QEMU's own stream.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
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

/// QEMU runs as a user of its own, and the agents may not reach into other
/// users' processes. (Their directories are open to all here: QEMU has to find
/// the sockets that it is told of.)
#[test]
fn inline_where_the_agent_may_not_reach_qemus_memory() {
    let by = "umask 0; exec setpriv --bounding-set=-sys_ptrace \"$@\"";
    for tap in ["multifd", "classic"] {
        let mut world = World::new(Link::one(1000));
        for side in [Side::A, Side::B] {
            world.kill_agent(side);
            world.start_agent_by(side, &["sh", "-c", by, "sh"]);
            let state = world.host(side).run_dir.join("state");
            for dir in [world.host(side).run_dir.clone(), state.join("run"), state] {
                fs::set_permissions(dir, Permissions::from_mode(0o777)).unwrap();
            }
        }
        let mut spec = guest("256M", RATE);
        let as_user = if world.kit.qemu_version.major < 10 {
            ["-runas", "nobody"]
        } else {
            ["-run-with", "user=nobody"]
        };
        spec.extra.extend(as_user.map(str::to_owned));
        let guest = world.boot(&spec);
        for side in [Side::A, Side::B] {
            let report = world.migrate(&guest, side, &["--tap", tap]);
            assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "inline"));
            let said = report.notes.iter().any(|note| note.contains("is placed inline"));
            assert!(said, "{:?}", report.notes);
        }
    }
}
