//! Who has a domain wherever a message is lost, an agent restarts, a process exits, or a side gives
//! up: every state that xl, both agents with their journals, and the receiver reach together.
//!
//! The machines are the switchover's; what they have agents do is done to xl and its receiver as the
//! engine does it. At any time at most one host runs the domain. When both agents run again and
//! messages arrive, exactly one does, or an operator sees that it is in doubt.

mod agents;
mod processes;
mod step;
mod world;

use std::collections::{HashSet, VecDeque};

use switchover::journal::Side;

use crate::processes::{ReceivedCopy, Xl};
use crate::step::Step;
use crate::world::{Mistake, World};

/// Whether it is also checked how each world ends without further faults, which takes long.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Checked,
    Ignored,
}

/// Visits all worlds with at most `faults` faults on the way to them, and returns how many there
/// are, or how one of them violates the rules.
fn explore(mistake: Mistake, faults: u8, ends: Ends) -> Result<usize, String> {
    let first = World::new(mistake, faults);
    let mut seen = HashSet::from([first.clone()]);
    let mut queue = VecDeque::from([(first, Vec::new())]);
    while let Some((world, story)) = queue.pop_front() {
        for step in Step::all() {
            let mut next = world.clone();
            if !next.take(step) || next == world {
                continue;
            }
            if let Some(violation) = next.violation() {
                return Err(format!("{violation}: {story:?}, {step:?}\n{next:?}"));
            }
            if seen.insert(next.clone()) {
                let mut story: Vec<Step> = story.clone();
                story.push(step);
                queue.push_back((next, story));
            }
        }
        if ends == Ends::Ignored {
            continue;
        }
        let mut calm = world;
        calm.calm_down();
        if let Some(violation) = calm.violation().or_else(|| calm.violation_when_calm()) {
            return Err(format!("{violation}, at last: {story:?}\n{calm:?}"));
        }
    }
    Ok(seen.len())
}

#[test]
fn a_domain_runs_on_one_host_whatever_happens() {
    for (faults, ends, least) in [(1, Ends::Checked, 100), (2, Ends::Ignored, 1000)] {
        let worlds = explore(Mistake::None, faults, ends);
        let worlds = worlds.unwrap_or_else(|story| panic!("{story}"));
        assert!(worlds > least, "{worlds} worlds");
    }
}

/// What would be wrong is found.
#[test]
fn mistakes_are_found() {
    for (mistake, found) in [
        (Mistake::ClosesAfterReady, "the domain runs nowhere"),
        (Mistake::OffersUnnoted, "the domain runs nowhere"),
        (Mistake::GuessesThatItFailed, "both hosts run the domain"),
        (Mistake::TakesSilenceForFailure, "both hosts run the domain"),
    ] {
        let story = explore(mistake, 1, Ends::Checked).expect_err("a mistake");
        assert!(story.starts_with(found), "{mistake:?}: {story}");
    }
}

#[test]
fn a_migration_without_faults_moves_the_domain() {
    let mut world = World::new(Mistake::None, 0);
    world.calm_down();
    assert_eq!((world.xl, world.copy), (Xl::Destroyed, ReceivedCopy::Running), "{world:?}");
    assert!(!world.was_handed_back);
}

/// Goes on until this holds, without faults.
fn until(holds: impl Fn(&World) -> bool) -> World {
    let mut world = World::new(Mistake::None, 1);
    while !holds(&world) {
        assert!(world.takes_one(), "it never holds: {world:?}");
    }
    world
}

/// Both agents are killed there, and run again.
fn after_restart(mut world: World) -> World {
    world.faults_left = 2;
    for side in [Side::Source, Side::Destination] {
        assert!(world.take(Step::Crashes(side)));
    }
    world.calm_down();
    world
}

#[test]
fn agents_killed_during_the_stream_leave_the_domain_at_its_source() {
    let world = after_restart(until(|world| world.xl == Xl::Streaming));
    assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None), "{world:?}");
}

/// xl would leave its domain suspended for good.
#[test]
fn agents_killed_before_the_commit_hand_the_domain_back() {
    let world = after_restart(until(|world| world.xl == Xl::Permitted));
    assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None), "{world:?}");
    assert!(world.was_handed_back);
}

#[test]
fn agents_killed_after_the_commit_move_the_domain() {
    let runs: fn(&World) -> bool = |world| world.copy == ReceivedCopy::Running;
    let places: [fn(&World) -> bool; 3] = [World::is_committed, World::is_permitted, runs];
    for holds in places {
        let world = after_restart(until(holds));
        assert_eq!((world.xl, world.copy), (Xl::Destroyed, ReceivedCopy::Running), "{world:?}");
    }
}

/// The copy is then the only one that can run.
#[test]
fn a_domain_moves_though_xl_was_killed() {
    let mut world = until(World::is_committed);
    assert!(world.take(Step::XlIsKilled));
    world.calm_down();
    assert_eq!((world.xl, world.copy), (Xl::Destroyed, ReceivedCopy::Running), "{world:?}");
}
