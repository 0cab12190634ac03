//! Carried migrations in post-copy: the VM runs at the destination while part of its memory is
//! still at the source, so agents neither cancel such a migration nor end before it has ended.

use api::{Outcome, Phase, Progress, Report};
use end_to_end::commander::{Commander, Way};
use end_to_end::{MIB, Side, World, assert_intact, bare, note, terminate, until};
use lab::hosts::Link;
use lab::setup::{self, Accelerator};
use serde_json::json;

/// What QEMU 7.2 moves correctly: no multiple of 256 KiB.
const MEMORY: &str = "262296k";
const RATE: u64 = 500_000;
/// Bytes per second in post-copy, until the limit is lifted: too slow to end before. Pages that the
/// guest asks for have no limit.
const POSTCOPY_BANDWIDTH: u64 = 100_000;

/// A guest under KVM, or none if that runs none. Under TCG QEMU's own migration loses track of
/// pages if the VM is stopped after few passes.
fn commander() -> Option<Commander> {
    let kit = setup::ensure().unwrap();
    if !setup::kvm_runs_bare(&kit).unwrap() {
        note("KVM runs no guest on this machine: agents were not tried with post-copy");
        return None;
    }
    let mut spec = bare(MEMORY, RATE);
    spec.machine = "pc-q35-7.2".to_owned();
    spec.accelerator = Some(Accelerator::Kvm);
    // A KVM that emulates takes half a minute to write or check as much that is random.
    spec.orders.repeated = true;
    (spec.orders.random_bytes, spec.orders.text_bytes) = (16 * MIB, 0);
    spec.orders.working_set_bytes = 4 * MIB;
    // Compressed, pages of one word each would all be there before it turns.
    let agent = ["", "compress = \"off\""];
    Some(Commander::with(World::new(Link::one(24)), spec, &kit.qemu, agent))
}

/// Turns a migration from A to post-copy, as libvirt does, and has the VM run at B.
fn turn(commander: &Commander) {
    let source = &commander.at(Side::A).qmp;
    let limit = json!({ "max-postcopy-bandwidth": POSTCOPY_BANDWIDTH });
    source.execute("migrate-set-parameters", limit).unwrap();
    source.execute("migrate-start-postcopy", json!({})).unwrap();
    until("it has turned to post-copy", || {
        let status = source.execute("query-migrate", json!({})).unwrap()["status"].clone();
        assert!(status != "completed" && status != "failed", "{status}: {}", commander.logs());
        if status == "pre-switchover" {
            source.execute("migrate-continue", json!({ "state": "pre-switchover" })).unwrap();
        }
        status == "postcopy-active"
    });
    // Its agent has seen what its QEMU has seen.
    let destination = &commander.at(Side::B).qmp;
    until("the destination has turned to post-copy", || {
        let status = destination.execute("query-migrate", json!({})).unwrap()["status"].clone();
        status == "postcopy-active"
    });
    destination.execute("cont", json!({})).unwrap();
}

/// Has QEMU send what is left as fast as the link carries.
fn lift_limit(commander: &Commander) {
    let none = json!({ "max-postcopy-bandwidth": 0 });
    commander.at(Side::A).qmp.execute("migrate-set-parameters", none).unwrap();
}

fn in_phase(commander: &Commander, phase: Phase) -> Option<Progress> {
    commander.progress(Side::A).filter(|one| one.phase == phase)
}

/// Begins a migration from A, with these capabilities, which turns to post-copy.
fn in_postcopy(commander: &mut Commander, capabilities: &[&'static str]) -> Way {
    let mut way = commander.way(Side::A, false, 0);
    way.more = capabilities.to_vec();
    commander.begin(Side::A, &way);
    until("it is carried", || in_phase(commander, Phase::FirstPass).is_some());
    turn(commander);
    way
}

/// Asserts that the source's agent refuses to cancel it, that both agents wait for it when they are
/// ordered to end, and that the VM arrives.
fn assert_waited_for(commander: &mut Commander) {
    let mut id = String::new();
    until("the source's agent knows", || {
        id = in_phase(commander, Phase::Committed).map(|one| one.id).unwrap_or_default();
        !id.is_empty()
    });
    let (world, agent) = (&commander.world, commander.world.agent(Side::A));
    let refused = agent.command(world.host(Side::A), &["cancel", &id]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("too late"), "{refused:?}");

    for (side, says) in [(Side::A, "past its commit: the agent waits"), (Side::B, "stopping;")] {
        let agent = commander.world.agent(side);
        terminate(agent.pid());
        until("the agent is about to end", || agent.log_text().contains(says));
    }
    lift_limit(commander);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    assert_intact(&commander.guest);
    for side in [Side::A, Side::B] {
        until("its agent has ended", || commander.world.has_ended(side));
        commander.world.start_agent(side);
    }
    let report = commander.world.tells(Side::A, &["report", &id, "--json"]);
    let report: Report = serde_json::from_str(&report).unwrap();
    assert_eq!((report.tap.as_str(), &report.outcome), ("relayed", &Outcome::Done), "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("turned to post-copy")), "{report:?}");
}

#[test]
fn it_is_neither_cancelled_nor_broken_off_by_agents_that_end() {
    let Some(mut commander) = commander() else { return };
    in_postcopy(&mut commander, &["postcopy-ram"]);
    assert_waited_for(&mut commander);
}

/// With this machine type QEMU connects for them when the migration begins, and is silent until it
/// turns to post-copy.
#[test]
fn urgent_pages_have_a_connection_of_their_own() {
    let Some(mut commander) = commander() else { return };
    in_postcopy(&mut commander, &["postcopy-ram", "postcopy-preempt"]);
    lift_limit(&commander);
    assert_eq!(commander.follow(Side::A), "completed", "{}", commander.logs());
    assert_intact(&commander.guest);
}

/// Its connections break, and both QEMUs wait until its manager resumes it, as `virsh migrate
/// --postcopy-resume` does.
#[test]
fn one_that_is_resumed_is_neither_cancelled_nor_broken_off() {
    let Some(mut commander) = commander() else { return };
    let way = in_postcopy(&mut commander, &["postcopy-ram"]);
    commander.world.kill_agent(Side::A);
    for side in [Side::A, Side::B] {
        let qmp = &commander.at(side).qmp;
        until("it is paused in post-copy", || {
            let status = qmp.execute("query-migrate", json!({})).unwrap()["status"].clone();
            assert!(status != "completed", "it was over too early: {}", commander.logs());
            status == "postcopy-paused"
        });
    }
    commander.world.start_agent(Side::A);
    // As libvirt takes another one.
    let [there, here] = way.uris.map(|uri| uri.replace("49216", "49217"));
    let (source, destination) = (&commander.at(Side::A).qmp, &commander.at(Side::B).qmp);
    destination.execute("migrate-recover", json!({ "uri": there })).unwrap();
    source.execute("migrate", json!({ "uri": here, "resume": true })).unwrap();
    assert_waited_for(&mut commander);
}
