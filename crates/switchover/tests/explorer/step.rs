//! The steps that are possible in a world.

use switchover::journal::Side;
use switchover::{Resolution, destination, source};

use crate::world::{DestinationQemu, Said, SourceQemu, World};

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// An agent does its next action, or handles the result of one.
    Does(Side),
    /// Its next action fails.
    Fails(Side, Failure),
    Crashes(Side),
    /// Both sides crash at once: they are one agent, as in a migration within one host.
    BothCrash,
    Restarts(Side),
    Boots(Side),
    /// A host fails for good, or is fenced.
    GoesOff(Side),
    /// The destination's agent comes back without its state directory.
    LosesJournal,
    Hears(Said),
    /// An agent's wait times out.
    Late(Side),
    CutOff(Side),
    GivesUp(Side),
    /// An agent sees what its QEMU did.
    Notices(Side),
    Resolves(Side, Resolution),
    SourceStops,
    SourceCompletes,
    /// QEMU ends `failed`, and runs the VM again by itself.
    SourceResumes,
    /// QEMU, which has released the VM, runs it by an order that is not the agent's.
    SourceOrdered,
    DestinationLoads,
    QemuDies(Side),
    /// The owner stops the VM through its agent.
    OwnerEnds,
}

/// How an action fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Nothing is on disk.
    Unwritten,
    /// It is on disk nevertheless.
    WrittenAllTheSame,
    /// QEMU refuses.
    Refused,
    /// QEMU does not answer, and has not done it.
    Unclear,
    /// QEMU does not answer, and has done it.
    UnclearButDone,
}

const SIDES: [Side; 2] = [Side::Source, Side::Destination];

impl World {
    /// All possible steps.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::with_capacity(24);
        for side in SIDES {
            if self.is_off(side) {
                continue;
            }
            self.steps_of_agent(side, &mut steps);
            if self.faults_left > 0 && !self.has_run_unnoticed(side) {
                steps.extend([Step::Boots(side), Step::GoesOff(side)]);
                if self.lives(side) {
                    steps.push(Step::QemuDies(side));
                }
            }
        }
        // If one is down or has no part in it, this is a crash of the other one alone.
        let both = self.source.machine().is_some() && self.destination.machine().is_some();
        if self.faults_left > 0 && both {
            steps.push(Step::BothCrash);
        }
        match self.source_qemu {
            SourceQemu::Streaming => steps.push(Step::SourceStops),
            SourceQemu::Finishing => {
                steps.push(Step::SourceCompletes);
                if self.faults_left > 0 {
                    steps.push(Step::SourceResumes);
                }
            }
            SourceQemu::Completed if self.handed_over && self.faults_left > 0 => {
                steps.push(Step::SourceOrdered);
            }
            _ => {}
        }
        let loads = self.streamed && self.destination_qemu == DestinationQemu::Waiting;
        if loads && self.idle_machine(Side::Destination) {
            steps.push(Step::DestinationLoads);
        }
        steps
    }

    fn steps_of_agent(&self, side: Side, steps: &mut Vec<Step>) {
        if self.is_down(side) {
            steps.push(Step::Restarts(side));
            let journal = side == Side::Destination && self.destination_disk.is_some();
            if journal && self.faults_left > 0 {
                steps.push(Step::LosesJournal);
            }
            return;
        }
        let received = Said::ALL.into_iter().filter(|said| said.to() == side);
        let received = received.filter(|said| self.said & said.bit() != 0).map(Step::Hears);
        if self.is_busy(side) {
            steps.push(Step::Does(side));
            if self.faults_left > 0 {
                steps.extend(self.failures(side).iter().map(|how| Step::Fails(side, *how)));
            }
        } else if self.idle_machine(side) {
            steps.extend([Step::Late(side), Step::CutOff(side), Step::GivesUp(side)]);
            steps.push(Step::Notices(side));
            steps.extend(received);
            self.decisions(side, steps);
        } else {
            steps.extend(received);
            return;
        }
        if self.faults_left > 0 {
            steps.push(Step::Crashes(side));
        }
    }

    fn failures(&self, side: Side) -> &'static [Failure] {
        const DISK: [Failure; 2] = [Failure::Unwritten, Failure::WrittenAllTheSame];
        match side {
            Side::Source => match self.source.next_action() {
                Some(source::Action::Journal(_) | source::Action::Forget) => &DISK,
                Some(source::Action::QemuGoOn { .. }) if self.lives(side) => &[Failure::Refused],
                _ => &[],
            },
            Side::Destination => match self.destination.next_action() {
                Some(destination::Action::Journal(_) | destination::Action::Forget) => &DISK,
                Some(destination::Action::QemuCont) if self.former_runs() => &[],
                Some(destination::Action::QemuCont) => match self.destination_qemu {
                    DestinationQemu::Loaded => {
                        &[Failure::Refused, Failure::Unclear, Failure::UnclearButDone]
                    }
                    DestinationQemu::Runs => &[Failure::UnclearButDone],
                    _ => &[],
                },
                _ => &[],
            },
        }
    }

    /// An operator fences first: the other host is off, or the operator has checked it. So it is
    /// when the operator decides a second time, after a VM was taken back.
    fn decisions(&self, side: Side, steps: &mut Vec<Step>) {
        let mut decide = |resolution, may| {
            let takes = match side {
                Side::Source => self.source.machine().is_some_and(|m| m.takes(resolution)),
                Side::Destination => {
                    self.destination.machine().is_some_and(|m| m.takes(resolution))
                }
            };
            if takes && may {
                steps.push(Step::Resolves(side, resolution));
            }
        };
        match side {
            Side::Source => {
                decide(Resolution::Here, self.destination_off);
                decide(Resolution::There, self.destination_qemu.holds());
            }
            Side::Destination => {
                decide(Resolution::Here, self.source_off || !self.lives(Side::Source));
                let paused = self.destination_qemu != DestinationQemu::Runs;
                decide(Resolution::There, paused && self.lives(Side::Source));
            }
        }
        if side == Side::Destination
            && self.faults_left > 0
            && self.destination_disk == Some(destination::Noted::Running)
            && self.destination_qemu == DestinationQemu::Runs
        {
            steps.push(Step::OwnerEnds);
        }
    }

    /// Whether the former QEMU runs the VM in RAM that the next one has, too.
    pub(crate) fn former_runs(&self) -> bool {
        self.handed_over && self.source_qemu.runs()
    }

    /// Nothing notices one that has run and ended, all before it was to be killed.
    fn has_run_unnoticed(&self, side: Side) -> bool {
        side == Side::Source && self.handed_over && self.source_qemu == SourceQemu::WentOn
    }

    pub(crate) fn is_off(&self, side: Side) -> bool {
        match side {
            Side::Source => self.source_off,
            Side::Destination => self.destination_off,
        }
    }

    pub(crate) fn is_down(&self, side: Side) -> bool {
        match side {
            Side::Source => self.source.is_down(),
            Side::Destination => self.destination.is_down(),
        }
    }

    pub(crate) fn is_busy(&self, side: Side) -> bool {
        match side {
            Side::Source => self.source.is_busy(),
            Side::Destination => self.destination.is_busy(),
        }
    }

    /// Whether its machine is waiting for an event.
    pub(crate) fn idle_machine(&self, side: Side) -> bool {
        let machine = match side {
            Side::Source => self.source.machine().is_some(),
            Side::Destination => self.destination.machine().is_some(),
        };
        machine && !self.is_busy(side)
    }

    pub(crate) fn lives(&self, side: Side) -> bool {
        match side {
            Side::Source => self.source_qemu != SourceQemu::Dead,
            Side::Destination => self.destination_qemu != DestinationQemu::Dead,
        }
    }
}
