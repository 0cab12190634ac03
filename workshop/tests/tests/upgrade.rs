//! Agents of the previous release (`PREVIOUS_DROVEWAY`; `make upgrade-test` builds it): VMs move
//! from one release to the other and back, and stay while an agent is replaced.

use std::path::PathBuf;

use api::{Outcome, Phase};
use end_to_end::{Side, World, assert_intact, bare, note, until};
use lab::agent::binary;
use lab::hosts::Link;
use marks::runs;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;

/// Two hosts with agents of the previous release.
fn before() -> Option<(World, PathBuf)> {
    let Some(previous) = std::env::var_os("PREVIOUS_DROVEWAY").map(PathBuf::from) else {
        note("there is no earlier release here: `make upgrade-test` builds it");
        return None;
    };
    let mut world = World::new(Link::one(500));
    for side in [Side::A, Side::B] {
        world.replace_agent(side, &previous);
    }
    Some((world, previous))
}

/// The hosts are upgraded one after the other, and one is downgraded.
#[runs(requested)]
#[test]
fn vms_go_from_release_to_release() {
    let Some((mut world, previous)) = before() else { return };
    let guest = world.boot(&bare(ODD, RATE));
    drop(world.migrate(&guest, Side::A, &[]));
    world.replace_agent(Side::A, &binary());
    for tap in ["multifd", "classic"] {
        // From the older to the newer, and back.
        drop(world.migrate(&guest, Side::B, &["--tap", tap]));
        drop(world.migrate(&guest, Side::A, &["--tap", tap]));
    }
    world.replace_agent(Side::B, &binary());
    drop(world.migrate(&guest, Side::B, &[]));
    world.replace_agent(Side::A, &previous);
    drop(world.migrate(&guest, Side::A, &[]));
}

/// An agent of this release coordinates a gang whose VM leaves a host of the release before, and
/// then one whose VM goes there.
#[runs(requested)]
#[test]
fn a_gang_goes_from_release_to_release() {
    let Some((mut world, _)) = before() else { return };
    let guest = world.boot(&bare(ODD, RATE));
    world.replace_agent(Side::B, &binary());
    for (from, order) in [(Side::A, "web1=host-b"), (Side::B, "web1=host-a")] {
        let moving = world.begin_all(&[&guest], Side::B, from, &["gang", order, "--json"]);
        let (success, _, said) = moving.wait_any();
        assert!(success, "{order}: {said}\n{}", world.agent(Side::A).log_text());
        world.assert_moved(&guest, from);
        world.assert_intact(&guest);
    }
}

/// VMs run on while their agent is replaced, and the next agent knows them.
#[runs(requested)]
#[test]
fn an_agent_is_replaced_while_vms_run() {
    let Some((mut world, previous)) = before() else { return };
    let guest = world.boot(&bare(ODD, RATE));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    for program in [binary(), previous, binary()] {
        world.replace_agent(Side::A, &program);
        assert_eq!(world.vm(Side::A, "web1").unwrap().pid, pid);
        assert_intact(&guest);
    }
    drop(world.migrate(&guest, Side::A, &[]));
}

/// How often an agent has settled a VM that a former one left, or failed to.
fn verdicts(log: &str) -> usize {
    let verdict = |line: &&str| {
        ["source_effects: settled", "source_effects: in doubt"].iter().any(|it| line.contains(it))
    };
    log.lines().filter(verdict).count()
}

/// In the middle of a migration the VM stays, whichever end is replaced, and by whichever release.
/// One of the release before may not settle it, but the next one does.
#[runs(requested)]
#[test]
fn an_agent_is_replaced_while_a_vm_moves() {
    let Some((mut world, previous)) = before() else { return };
    let guest = world.boot(&bare(ODD, RATE));
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    for (side, program, settles) in [
        (Side::B, binary(), true),
        (Side::A, binary(), true),
        (Side::B, previous.clone(), true),
        // It doesn't know the socket that keeps QEMU's channels connected.
        (Side::A, previous, false),
    ] {
        let mut moving = world.begin(&guest, Side::A, &[]);
        moving.wait_for(Phase::FirstPass);
        let before = verdicts(&world.agent(Side::A).whole_log());
        world.replace_agent(side, &program);
        if side == Side::A {
            // Its command has lost its agent.
            let _ = moving.wait_any();
        } else {
            let ended = moving.wait();
            assert!(matches!(ended.report.outcome, Outcome::Failed(_)), "{}", ended.said);
        }
        if !settles {
            let has_tried = || verdicts(&world.agent(Side::A).whole_log()) > before;
            until("it has tried", has_tried);
            assert_eq!(world.vm(Side::A, "web1").unwrap().pid, pid);
            assert_intact(&guest);
            world.replace_agent(Side::A, &binary());
        }
        world.assert_stayed(&guest, Side::A, pid);
    }
    drop(world.migrate(&guest, Side::A, &[]));
}
