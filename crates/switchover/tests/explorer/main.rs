//! Visits every state that a switchover can reach.
//!
//! Both machines, their journals, both QEMUs and both hosts form one [`World`]. From each world,
//! all possible next steps are tried: an agent does its next action, crashes between two of them,
//! alone or together with the other one, restarts; a host boots, or fails for good; a disk fails,
//! with or without having written; `cont` fails; a QEMU dies, or resumes by itself; an operator
//! decides. Any message that was ever sent can be received at any time, again, or never, which
//! covers everything that a network can do. Only the number of failures on one path is limited.
//!
//! In each world: two QEMUs never run the VM, none runs it after its state was run elsewhere, and
//! it is not lost unless faults destroyed it; the end of the source's QEMU does not if that had
//! released the VM. Once a side has noted that the other one has the VM too, it does not try its
//! own copy. A VM that continues never waits until the other side has read something. And from each
//! world, once nothing fails any more, both sides end by themselves, or one asks for an operator,
//! whose decision ends it. An operator who has taken the VM back ends that without the destination,
//! too, by the same decision again.

mod calm;
mod effect;
mod mixer;
mod mutation;
mod said;
mod search;
mod step;
mod world;

use mutation::Mutation;
use search::explore;
use world::Vm;

#[test]
fn no_state_runs_the_vm_twice_and_none_loses_it() {
    let found = explore(Mutation::None, Vm::Runs, 5);
    println!("{found}");
    assert!(found.violation.is_none(), "{found}");
    // With fewer, something was not explored.
    assert!(found.worlds >= 1_000_000, "only {} worlds", found.worlds);
    // `RunsAtBoth` alone is not among them: it takes a `cont` from outside after the commit, and
    // then two QEMUs run the VM.
    assert_eq!(found.doubts, 11, "every other kind of doubt there is");
}

#[test]
fn a_vm_that_its_owner_paused_is_as_safe() {
    let found = explore(Mutation::None, Vm::Paused, 4);
    println!("{found}");
    assert!(found.violation.is_none(), "{found}");
    assert!(found.worlds >= 500_000, "only {} worlds", found.worlds);
}

/// Until the former QEMU is killed, something else may order it to run the VM at any time.
#[test]
fn a_vm_whose_ram_both_qemus_have_is_as_safe() {
    let found = explore(Mutation::None, Vm::HandedOver, 4);
    println!("{found}");
    assert!(found.violation.is_none(), "{found}");
    assert!(found.worlds >= 200_000, "only {} worlds", found.worlds);
}

/// Tests the explorer: each of these is a plausible mistake.
#[test]
fn mistakes_are_found() {
    let missed: Vec<Mutation> = Mutation::MISTAKES
        .into_iter()
        .filter(|mistake| {
            let found = explore(*mistake, mistake.vm(), 2);
            println!("{mistake:?}: {found}");
            found.violation.is_none()
        })
        .collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
