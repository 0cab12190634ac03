//! Runs a world without further failures: agents restart, messages arrive, waits time out.

use std::collections::VecDeque;

use switchover::journal::Side;
use switchover::source::{By, Phase};
use switchover::{Doubt, Resolution};

use crate::mixer::Seen;
use crate::step::Step;
use crate::world::{Agent, DestinationQemu, SourceQemu, World};

/// Rounds of timeouts. Three would do.
const ROUNDS_MAX: usize = 20;
/// Steps between two timeouts.
const STEPS_MAX: usize = 200;

const SIDES: [Side; 2] = [Side::Source, Side::Destination];

/// The worlds that were found to end well.
#[derive(Default)]
pub(crate) struct Calm {
    seen: Seen,
}

impl Calm {
    /// How many worlds were tried.
    pub(crate) fn tried(&self) -> usize {
        self.seen.len()
    }

    /// Checks that both sides end by themselves, or that an operator is asked and can end it.
    pub(crate) fn ends_well(&mut self, world: &World) -> Result<(), String> {
        if !self.seen.insert(world.calm_fingerprint()) {
            return Ok(());
        }
        for first in SIDES {
            let end = settled(world, first)?;
            judge(&end, first).map_err(|what| format!("{what}, in the end: {end:?}"))?;
        }
        Ok(())
    }
}

/// The final world, if the waits of `first` time out first.
fn settled(world: &World, first: Side) -> Result<World, String> {
    let mut world = world.clone();
    (world.said, world.faults_left) = (0, 0);
    world.mail = Some(VecDeque::new());
    let mut before = 0;
    for _ in 0..ROUNDS_MAX {
        run_dry(&mut world)?;
        let now = world.calm_fingerprint();
        if now == before {
            return Ok(world);
        }
        before = now;
        let second = if first == Side::Source { Side::Destination } else { Side::Source };
        for side in [first, second] {
            if world.idle_machine(side) {
                take(&mut world, Step::Late(side))?;
                run_dry(&mut world)?;
            }
        }
    }
    Err("it goes on for ever".to_owned())
}

/// Takes steps until nothing more happens without a timeout.
fn run_dry(world: &mut World) -> Result<(), String> {
    for _ in 0..STEPS_MAX {
        let Some(step) = next(world) else { return Ok(()) };
        take(world, step)?;
    }
    Err("it never rests".to_owned())
}

fn take(world: &mut World, step: Step) -> Result<(), String> {
    world.take(step);
    match world.check() {
        Some(what) => Err(format!("{what}, when nothing failed any more: {world:?}")),
        None => Ok(()),
    }
}

fn next(world: &mut World) -> Option<Step> {
    for side in SIDES {
        if world.is_busy(side) {
            return Some(Step::Does(side));
        }
        if world.is_down(side) && !world.is_off(side) {
            return Some(Step::Restarts(side));
        }
    }
    while let Some(said) = world.mail.as_mut().and_then(VecDeque::pop_front) {
        if !world.is_down(said.to()) {
            return Some(Step::Hears(said));
        }
    }
    let streams = world.source.machine().is_some();
    match world.source_qemu {
        SourceQemu::Streaming if streams => return Some(Step::SourceStops),
        SourceQemu::Finishing if streams => return Some(Step::SourceCompletes),
        _ => {}
    }
    let waits = world.destination_qemu == DestinationQemu::Waiting;
    if waits && world.streamed && world.destination.machine().is_some() {
        return Some(Step::DestinationLoads);
    }
    let news = |side: &Side| {
        let mut noticed = world.clone();
        noticed.take(Step::Notices(*side));
        world.idle_machine(*side) && noticed.calm_fingerprint() != world.calm_fingerprint()
    };
    SIDES.into_iter().find(news).map(Step::Notices)
}

fn judge(world: &World, first: Side) -> Result<(), String> {
    // Then it needs a human, and possibly no agent is left to report it.
    if world.history.journal_lost {
        return Ok(());
    }
    let both_up = !world.source_off && !world.destination_off;
    let over = world.source.is_stranger() && world.destination.is_stranger();
    let doubts = world.doubts();
    if world.is_gone() {
        let told = over || doubts.iter().any(Option::is_some);
        return if told || !both_up { Ok(()) } else { Err("the VM is gone, untold".to_owned()) };
    }
    // After an operator's decision, the two sides may disagree.
    let operator = world.history.operator;
    if world.running() == 1 && (over || !both_up || operator) {
        return settles_again(world, first);
    }
    let lost_there = matches!(doubts[0], Some(Doubt::LostThere { .. }));
    // An agent that was restarted does not know that the next QEMU never ran it.
    if both_up && !lost_there && !world.former_runs() && !operator {
        return Err("both hosts are up, and it does not end".to_owned());
    }
    if doubts.iter().all(Option::is_none) {
        return Err("nobody runs the VM, and no operator is asked".to_owned());
    }
    decide(world, first)
}

/// A VM that the operator took back is settled when the operator says so again: its destination may
/// never answer. Where the first decision could not be noted, it takes a third.
fn settles_again(world: &World, first: Side) -> Result<(), String> {
    let taken_back = [Phase::Reclaimed(By::Operator), Phase::RunsThereToo];
    if world.source_off || world.source_disk.is_none_or(|noted| !taken_back.contains(&noted.phase))
    {
        return Ok(());
    }
    let mut end = world.clone();
    for _ in 0..2 {
        if !end.source.is_stranger() {
            take(&mut end, Step::Resolves(Side::Source, Resolution::Here))?;
            end = settled(&end, first)?;
        }
    }
    if end.running() == 1 && end.source.is_stranger() {
        return Ok(());
    }
    Err(format!("it was taken back, and that is never settled: {end:?}"))
}

/// The operator fences the other side, and decides for the VM to be here.
fn decide(world: &World, first: Side) -> Result<(), String> {
    let mut decided = false;
    for (side, other) in [(Side::Source, Side::Destination), (Side::Destination, Side::Source)] {
        let here = Resolution::Here;
        let takes = match (side, &world.source, &world.destination) {
            (Side::Source, Agent::Up { machine, .. }, _) => machine.takes(here),
            (Side::Destination, _, Agent::Up { machine, .. }) => machine.takes(here),
            _ => false,
        };
        if !takes {
            continue;
        }
        let mut world = world.clone();
        world.goes_off(other);
        take(&mut world, Step::Resolves(side, here))?;
        let end = settled(&world, first)?;
        if end.running() != 1 {
            return Err(format!("the operator decided for {side:?}, and none runs: {end:?}"));
        }
        decided = true;
    }
    if decided { Ok(()) } else { Err("an operator is asked, and can do nothing".to_owned()) }
}
