//! The source's QEMU hangs while its VM moves: the reason names it, and the VM stays.

use api::{Outcome, Phase, VmStatus};
use end_to_end::{Frozen, MIB, Side, World, bare, until};
use lab::hosts::{Link, RUN_DIR};

/// Whether the VM runs can't be known meanwhile.
#[test]
fn the_reason_names_it_and_does_not_call_the_vm_stopped() {
    let mut world = World::new(Link::one(200));
    let config = world.host(Side::A).run_dir.join("agent.toml");
    std::fs::write(config, "[waits]\nstall = 5\n").unwrap();
    world.restart_agent_with(Side::A, &["--config", &format!("{RUN_DIR}/agent.toml")]);
    let mut spec = bare("256M", 500_000);
    spec.orders.random_bytes = 64 * MIB;
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &["--tap", "classic"]);
    moving.wait_for(Phase::FirstPass);
    let hangs = Frozen::new(pid);
    let ended = moving.wait();
    assert!(!ended.success, "{}", ended.said);
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report.outcome) };
    assert!(why.contains("the source's QEMU has handed over no data for"), "{why}");
    assert!(why.contains("QEMU did not end the migration of web1, or does not"), "{why}");
    until("it is in doubt", || {
        let vm = world.vm(Side::A, "web1").unwrap();
        let problem = vm.problem.unwrap_or_default();
        vm.status == VmStatus::InDoubt && problem.contains("If its guest answers, it runs")
    });
    drop(hangs);
    world.assert_stayed(&guest, Side::A, pid);
    drop(world.migrate(&guest, Side::A, &[]));
}
