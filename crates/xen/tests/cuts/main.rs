//! Who has a domain wherever the connection between the agents is cut, a process exits, or a side
//! cancels: every state that xl, both agents and the receiver reach together.
//!
//! At any time at most one host runs the domain. When nothing is left to happen, exactly one does,
//! and it is the one that the source's agent named when the connection was cut.

mod processes;
mod step;
mod world;

use std::collections::{HashSet, VecDeque};

use xen::handshake::source::{Holder, Outcome};

use crate::processes::{ReceivedCopy, Xl};
use crate::step::Step;
use crate::world::{Mistake, World};

/// Visits all worlds with at most `faults` faults on the way to them, and returns how many there
/// are, or how one of them violates the rules.
fn explore(mistake: Mistake, faults: u8) -> Result<usize, String> {
    let first = World::new(mistake, faults);
    let mut seen = HashSet::from([first.clone()]);
    let mut queue = VecDeque::from([(first, Vec::new())]);
    while let Some((world, story)) = queue.pop_front() {
        let mut is_settled = true;
        for step in Step::ALL {
            let mut next = world.clone();
            if !next.take(step) {
                continue;
            }
            is_settled &= step.is_fault();
            if let Some(violation) = next.violation() {
                return Err(format!("{violation}: {story:?}, {step:?}\n{next:?}"));
            }
            if seen.insert(next.clone()) {
                let mut story = story.clone();
                story.push(step);
                queue.push_back((next, story));
            }
        }
        if let Some(violation) = world.violation_when_settled().filter(|_| is_settled) {
            return Err(format!("{violation}: {story:?}\n{world:?}"));
        }
    }
    Ok(seen.len())
}

#[test]
fn a_domain_runs_on_one_host_whatever_happens() {
    let worlds = explore(Mistake::None, 3).unwrap_or_else(|story| panic!("{story}"));
    assert!(worlds > 1000, "{worlds} worlds");
}

/// What would be wrong is found.
#[test]
fn mistakes_are_found() {
    for (mistake, found) in [
        (Mistake::ClosesAfterReady, "the domain runs nowhere"),
        (Mistake::GuessesThatItFailed, "both hosts run the domain"),
        (Mistake::TakesSilenceForFailure, "a copy that runs is destroyed"),
    ] {
        let story = explore(mistake, 2).expect_err("a mistake");
        assert!(story.starts_with(found), "{mistake:?}: {story}");
    }
}

/// The steps of a migration that succeeds.
const MIGRATION: [Step; 20] = [
    Step::ReceiverGoesOn,
    Step::DestinationReads,
    Step::BackArrives,
    Step::XlReads,
    // 4: xl sends its stream.
    Step::XlStreams,
    Step::ForwardArrives,
    Step::ReceiverGoesOn,
    // 7: the receiver is ready.
    Step::DestinationReads,
    Step::BackArrives,
    Step::XlReads,
    Step::SourceReads,
    // 11: xl has written its permission.
    Step::ForwardArrives,
    Step::BackArrives,
    // 13: the permission was sent.
    Step::ForwardArrives,
    Step::ReceiverGoesOn,
    Step::ReceiverGoesOn,
    // 16: the receiver has unpaused the copy, and reported.
    Step::DestinationReads,
    Step::BackArrives,
    // 18: the source's agent has answered xl.
    Step::XlReads,
    Step::DestinationSeesExit,
];

/// The world that results if the connection is cut after these steps of [`MIGRATION`].
fn cut_after(steps: usize, can_connect: bool) -> World {
    let mut world = World::new(Mistake::None, 1);
    for step in &MIGRATION[..steps] {
        assert!(world.take(*step), "{step:?}: {world:?}");
    }
    assert!(world.take(Step::Cut));
    settle(&mut world, can_connect);
    world
}

/// Takes all steps that are possible, in any order.
fn settle(world: &mut World, can_connect: bool) {
    let steps = Step::ALL.into_iter().filter(|step| !step.is_fault());
    let steps: Vec<Step> = steps.filter(|step| can_connect || *step != Step::Connects).collect();
    while steps.iter().any(|step| world.take(*step)) {}
}

#[test]
fn a_migration_without_faults_moves_the_domain() {
    let mut world = World::new(Mistake::None, 0);
    for step in MIGRATION {
        assert!(world.take(step), "{step:?}: {world:?}");
    }
    assert_eq!((world.xl, world.copy), (Xl::Destroyed, ReceivedCopy::Running));
    assert_eq!(world.holder(), Holder::Destination);
}

#[test]
fn cut_before_or_during_the_stream_the_source_runs_on() {
    for steps in 0..=6 {
        let world = cut_after(steps, false);
        assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None), "{steps}");
        assert_eq!(world.holder(), Holder::Source);
    }
}

#[test]
fn cut_before_ready_is_delivered_the_source_resumes_by_itself() {
    for steps in 7..=8 {
        let world = cut_after(steps, false);
        assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None), "{steps}");
        assert!(!world.was_handed_back, "{steps}");
    }
}

/// xl would leave its domain suspended for good.
#[test]
fn cut_before_the_permission_is_sent_the_domain_is_handed_back() {
    for steps in 9..=12 {
        let world = cut_after(steps, false);
        assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None), "{steps}");
        assert!(world.was_handed_back, "{steps}");
    }
}

/// The destination had noticed the cut, and closed its receiver, before the permission came again.
#[test]
fn a_permission_that_was_not_delivered_is_answered_by_failure() {
    let mut world = World::new(Mistake::None, 1);
    for step in MIGRATION[..13].iter().chain(&[
        Step::Cut,
        Step::DestinationNotices,
        Step::SourceNotices,
        Step::Connects,
        Step::ForwardArrives,
    ]) {
        assert!(world.take(*step), "{step:?}: {world:?}");
    }
    assert_eq!((world.xl, world.holder()), (Xl::Permitted, Holder::AskDestination));
    settle(&mut world, true);
    assert_eq!((world.xl, world.copy), (Xl::Resumed, ReceivedCopy::None));
}

/// The copy is then the only one that can run.
#[test]
fn a_domain_moves_though_xl_was_killed() {
    let mut world = World::new(Mistake::None, 1);
    let killed = [Step::XlIsKilled, Step::SourceSeesExit];
    for step in MIGRATION[..11].iter().chain(&killed) {
        assert!(world.take(*step), "{step:?}: {world:?}");
    }
    settle(&mut world, true);
    assert_eq!((world.copy, world.outcome), (ReceivedCopy::Running, Some(Outcome::Moved)));

    let mut world = World::new(Mistake::None, 2);
    for step in MIGRATION[..11].iter().chain(&killed).chain(&[Step::Cut]) {
        assert!(world.take(*step), "{step:?}: {world:?}");
    }
    settle(&mut world, true);
    assert_eq!((world.copy, world.outcome), (ReceivedCopy::None, Some(Outcome::Suspended)));
}

/// Until the agents have a connection again, xl waits, and nothing is guessed.
#[test]
fn cut_before_the_report_arrives_the_destination_is_asked() {
    for steps in 14..=17 {
        let world = cut_after(steps, false);
        assert_eq!((world.xl, world.copy), (Xl::Permitted, ReceivedCopy::Running), "{steps}");
        assert_eq!(world.holder(), Holder::AskDestination);
        let world = cut_after(steps, true);
        assert_eq!((world.xl, world.copy), (Xl::Destroyed, ReceivedCopy::Running), "{steps}");
        assert_eq!(world.holder(), Holder::Destination);
    }
}
