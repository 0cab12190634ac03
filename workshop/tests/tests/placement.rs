//! Pages are written straight into QEMU's RAM, or, where the agent can't reach it, go through
//! QEMU's own stream. (Where agents started both, `moves.rs` asserts it.)

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use api::Report;
use end_to_end::{Side, World, bare};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};
use lab::setup::Version;
use marks::runs;

const RATE: u64 = 5_000_000;

/// A VM that another program started, adopted by the agent. The agent starts its destination.
#[runs(promised)]
#[test]
fn an_adopted_vm_moves_and_comes_back() {
    let world = World::new(Link::one(1000));
    let spec = bare("256M", RATE);
    let mut adopted = world.start_unmanaged(Side::A, &spec, &world.kit.qemu, &[]);
    let guest = Guest::meet(spec, &world.hosts.a).unwrap();
    world.attach("web1");
    let vm = world.vm(Side::A, "web1").unwrap();
    assert_eq!((vm.attached, vm.pid), (true, adopted.id()));
    let moving = world.begin(&guest, Side::A, &[]);
    adopted.wait().unwrap();
    let report = world.arrive(&guest, Side::A, moving);
    assert_eq!(report.placement, "mapped");
    // The script that starts an unpacked QEMU sets a variable for it.
    let is_set = world.kit.own_qemu().environment().is_some();
    let is_noted =
        |report: &Report| report.notes.iter().any(|note| note.contains("QEMU_MODULE_DIR"));
    assert_eq!(is_noted(&report), is_set, "{:?}", report.notes);
    assert!(!world.vm(Side::B, "web1").unwrap().attached);
    let report = world.migrate(&guest, Side::B, &[]);
    assert_eq!(report.placement, "mapped");
    assert!(!is_noted(&report), "an agent has started it: {:?}", report.notes);
}

/// Another program started both QEMUs.
#[test]
fn into_a_qemu_that_somebody_else_started() {
    for tap in ["multifd", "classic"] {
        let world = World::new(Link::one(1000));
        let spec = bare("256M", RATE);
        let mut adopted = world.start_unmanaged(Side::A, &spec, &world.kit.qemu, &[]);
        let guest = Guest::meet(spec.clone(), &world.hosts.a).unwrap();
        world.attach("web1");
        let mut waiting =
            world.start_unmanaged(Side::B, &spec, &world.kit.qemu, &["-incoming", "defer", "-S"]);
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

/// A guest whose QEMU drops root's rights once it has started.
fn as_nobody(world: &World, version: Version) -> GuestSpec {
    // Under TCG, QEMU 7.2 loses no dirty pages with such a size.
    let mut spec = bare("262148k", RATE);
    let as_user =
        if version.major < 10 { ["-runas", "nobody"] } else { ["-run-with", "user=nobody"] };
    spec.extra.extend(as_user.map(str::to_owned));
    // QEMU removes its own sockets when it ends.
    for side in [Side::A, Side::B] {
        fs::set_permissions(&world.host(side).run_dir, Permissions::from_mode(0o777)).unwrap();
    }
    spec
}

/// Agents that may not access processes with more rights than theirs.
fn without_ptrace(world: &mut World) {
    for side in [Side::A, Side::B] {
        world.kill_agent(side);
        world.start_agent_by(side, &["setpriv", "--bounding-set=-sys_ptrace"]);
    }
}

fn assert_inline(report: &Report) {
    assert_eq!(report.placement, "inline");
    let said = report.notes.iter().any(|note| {
        note.contains("is placed inline") && note.contains("or as root with CAP_SYS_PTRACE")
    });
    assert!(said, "{:?}", report.notes);
}

/// QEMU reaches the agent's sockets, though it can't enter the agent's directories.
#[test]
fn mapped_where_qemu_runs_as_another_user() {
    let world = World::new(Link::one(1000));
    let kit = &world.kit;
    let versions = [(&kit.qemu, kit.qemu_version), (&kit.qemu_system, kit.qemu_system_version)];
    for (qemu, version) in versions {
        let guest = world.boot_with(&as_nobody(&world, version), qemu);
        for (side, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
            assert_another_user(&world, side);
            let report = world.migrate(&guest, side, &["--tap", tap]);
            assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"));
            // Others may say that a busy machine makes downtime long.
            let said = report.notes.iter().any(|note| note.contains("placed"));
            assert!(!said, "{:?}", report.notes);
        }
        world.says(Side::A, &["stop", "web1", "--force"]);
        world.assert_nothing_left(Side::A);
    }
}

fn assert_another_user(world: &World, side: Side) {
    let pid = world.vm(side, "web1").unwrap().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(!status.contains("Uid:\t0"), "{status}");
    let state = fs::metadata(world.host(side).run_dir.join("state")).unwrap();
    assert_eq!(state.permissions().mode() & 0o777, 0o700);
}

#[test]
fn inline_where_the_agent_may_not_reach_qemus_memory() {
    let mut world = World::new(Link::one(1000));
    without_ptrace(&mut world);
    let guest = world.boot(&as_nobody(&world, world.kit.qemu_version));
    for (side, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
        let report = world.migrate(&guest, side, &["--tap", tap]);
        assert_eq!(report.tap, tap);
        assert_inline(&report);
    }
}

/// The agent can hardly inspect these QEMUs, which have more rights than it.
#[test]
fn inline_where_somebody_elses_qemu_has_more_rights_than_the_agent() {
    let mut world = World::new(Link::one(1000));
    without_ptrace(&mut world);
    let spec = bare("256M", RATE);
    let mut adopted = world.start_unmanaged(Side::A, &spec, &world.kit.qemu, &[]);
    let guest = Guest::meet(spec.clone(), &world.hosts.a).unwrap();
    world.attach("web1");
    let mut waiting =
        world.start_unmanaged(Side::B, &spec, &world.kit.qemu, &["-incoming", "defer", "-S"]);
    drop(world.own_qmp(Side::B, "web1"));
    let socket = format!("{RUN_DIR}/web1.own");
    let moving = world.begin(&guest, Side::A, &["--incoming-qmp", &socket]);
    adopted.wait().unwrap();
    let report = world.arrive(&guest, Side::A, moving);
    assert_inline(&report);
    let relative = report.notes.iter().any(|note| note.contains("relative paths"));
    assert!(relative, "{:?}", report.notes);
    let moving = world.begin(&guest, Side::B, &[]);
    waiting.wait().unwrap();
    // The agent's own QEMU has no more rights than the agent.
    assert_eq!(world.arrive(&guest, Side::B, moving).placement, "mapped");
}
