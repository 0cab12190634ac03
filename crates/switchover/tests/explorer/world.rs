//! The state of the model: two agents, two disks, two QEMUs, two hosts, and the messages sent.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use switchover::journal::Side;
use switchover::{Doubt, Found, MigrationId, Wait, destination, source};

use crate::mixer::Mixer;
use crate::mutation::Mutation;
pub(crate) use crate::said::Said;

/// The migration's id.
pub(crate) fn id() -> MigrationId {
    thread_local! {
        static ID: MigrationId = MigrationId::new("m").unwrap();
    }
    ID.with(Clone::clone)
}

/// What kind of VM changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vm {
    Runs,
    /// By its owner.
    Paused,
    /// It runs, and both QEMUs have the same RAM: the former one is killed before the next one runs
    /// it. Something else may order the former one to run it until then.
    HandedOver,
}

/// The source's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SourceQemu {
    /// The VM runs and is streamed.
    Streaming,
    /// `finish-migrate`: everything is written, and QEMU has not reported how it ended.
    Finishing,
    /// `completed` and `postmigrate`.
    Completed,
    /// The VM runs, and QEMU's migration has ended.
    WentOn,
    Dead,
}

impl SourceQemu {
    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Streaming | Self::WentOn)
    }

    fn found(self) -> Found {
        match self {
            Self::Streaming | Self::WentOn => Found::Runs,
            Self::Finishing | Self::Completed => Found::Stopped,
            Self::Dead => Found::Missing,
        }
    }
}

/// The destination's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DestinationQemu {
    Waiting,
    Loaded,
    /// The VM runs; or it is paused, and its owner was notified that it is here.
    Runs,
    Dead,
}

impl DestinationQemu {
    pub(crate) fn holds(self) -> bool {
        matches!(self, Self::Loaded | Self::Runs)
    }

    fn found(self) -> Found {
        match self {
            Self::Waiting | Self::Loaded => Found::Stopped,
            Self::Runs => Found::Runs,
            Self::Dead => Found::Missing,
        }
    }
}

/// An agent.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Agent<M, A, E> {
    Down,
    /// It has no journal of the migration.
    Stranger,
    Up {
        machine: M,
        /// Actions that are not done yet.
        doing: VecDeque<A>,
        /// The result of the last action.
        came: Option<E>,
    },
}

impl<M, A, E> Agent<M, A, E> {
    pub(crate) fn up(machine: M, actions: Vec<A>) -> Self {
        Self::Up { machine, doing: actions.into(), came: None }
    }

    pub(crate) fn machine(&self) -> Option<&M> {
        match self {
            Self::Up { machine, .. } => Some(machine),
            _ => None,
        }
    }

    pub(crate) fn next_action(&self) -> Option<&A> {
        match self {
            Self::Up { doing, came: None, .. } => doing.front(),
            _ => None,
        }
    }

    /// Whether it is in the middle of a step.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Up { doing, came, .. } if came.is_some() || !doing.is_empty())
    }

    pub(crate) fn is_down(&self) -> bool {
        matches!(self, Self::Down)
    }

    /// Whether it does not take part in the migration, or no longer.
    pub(crate) fn is_stranger(&self) -> bool {
        matches!(self, Self::Stranger)
    }
}

pub(crate) type SourceAgent = Agent<source::Machine, source::Action, source::Event>;
pub(crate) type DestinationAgent =
    Agent<destination::Machine, destination::Action, destination::Event>;

/// What only an outside observer knows.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(crate) struct History {
    /// The VM ran at the destination.
    pub(crate) ran_there: bool,
    /// The VM ran at the source after its stream had ended.
    pub(crate) went_on: bool,
    /// `committed` is on disk, and was not taken back since.
    pub(crate) given: bool,
    /// A fault took the source's copy.
    pub(crate) source_fault: bool,
    /// A fault took the destination's copy, or made it useless.
    pub(crate) destination_fault: bool,
    /// An operator decided, and is responsible.
    pub(crate) operator: bool,
    /// The destination's agent came back without its state directory.
    pub(crate) journal_lost: bool,
    /// The owner ended the VM.
    pub(crate) ended: bool,
    /// The source's QEMU died when its agent knew that it had released the VM, of which the
    /// destination had the whole stream. Nothing else has gone wrong since, and nothing took long.
    pub(crate) must_live: bool,
}

/// The state of everything.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) mutation: Mutation,
    pub(crate) run: bool,
    pub(crate) handed_over: bool,
    pub(crate) source: SourceAgent,
    pub(crate) destination: DestinationAgent,
    pub(crate) source_disk: Option<source::Noted>,
    pub(crate) destination_disk: Option<destination::Noted>,
    pub(crate) source_qemu: SourceQemu,
    pub(crate) destination_qemu: DestinationQemu,
    pub(crate) source_off: bool,
    pub(crate) destination_off: bool,
    /// The source's QEMU has written its stream to the end.
    pub(crate) streamed: bool,
    /// A bit for each message that was ever sent.
    pub(crate) said: u8,
    pub(crate) faults_left: u8,
    pub(crate) history: History,
    /// Messages in flight, in order; only in a calm world.
    pub(crate) mail: Option<VecDeque<Said>>,
    /// A violation.
    pub(crate) broken: Option<&'static str>,
}

impl World {
    /// The start of a migration: both journals are open.
    pub(crate) fn new(mutation: Mutation, vm: Vm, faults: u8) -> Self {
        let run = vm != Vm::Paused;
        Self {
            mutation,
            run,
            handed_over: vm == Vm::HandedOver,
            source: Agent::up(source::Machine::new(id(), run), Vec::new()),
            destination: Agent::up(destination::Machine::new(id()), Vec::new()),
            source_disk: Some(source::Noted::opened(run)),
            destination_disk: Some(destination::Noted::Opened),
            source_qemu: SourceQemu::Streaming,
            destination_qemu: DestinationQemu::Waiting,
            source_off: false,
            destination_off: false,
            streamed: false,
            said: 0,
            faults_left: faults,
            history: History::default(),
            mail: None,
            broken: None,
        }
    }

    /// Identifies the world.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = Mixer::default();
        (self.said, self.faults_left).hash(&mut hasher);
        self.calm_fingerprint().hash(&mut hasher);
        hasher.finish()
    }

    /// Identifies it without regard to messages sent and faults left.
    pub(crate) fn calm_fingerprint(&self) -> u64 {
        let mut hasher = Mixer::default();
        (&self.source, &self.destination).hash(&mut hasher);
        (self.source_disk, self.destination_disk).hash(&mut hasher);
        (self.source_qemu, self.destination_qemu).hash(&mut hasher);
        (self.source_off, self.destination_off, self.streamed).hash(&mut hasher);
        self.history.hash(&mut hasher);
        hasher.finish()
    }

    pub(crate) fn send(&mut self, said: Said) {
        self.said |= said.bit();
        if let Some(mail) = &mut self.mail {
            mail.push_back(said);
        }
    }

    /// How many QEMUs run the VM.
    pub(crate) fn running(&self) -> usize {
        usize::from(self.source_qemu.runs())
            + usize::from(self.destination_qemu == DestinationQemu::Runs)
    }

    /// Whether no QEMU holds the VM.
    pub(crate) fn is_gone(&self) -> bool {
        self.source_qemu == SourceQemu::Dead && !self.destination_qemu.holds()
    }

    pub(crate) fn source_goes_on(&mut self) {
        if self.source_qemu == SourceQemu::WentOn {
            return;
        }
        self.source_qemu = SourceQemu::WentOn;
        self.history.went_on = true;
        if self.history.ran_there && !self.history.operator {
            self.broken = Some("the VM goes on at the source after it ran at the destination");
        }
    }

    pub(crate) fn destination_runs(&mut self) {
        match self.destination_qemu {
            DestinationQemu::Runs => return,
            DestinationQemu::Waiting => self.broken = Some("a VM that is not loaded is run"),
            _ => {}
        }
        self.destination_qemu = DestinationQemu::Runs;
        self.history.ran_there = true;
        if self.history.went_on && !self.history.operator {
            self.broken = Some("the destination runs a VM that has gone on at the source");
        }
    }

    pub(crate) fn source_qemu_dies(&mut self) {
        if self.source_qemu != SourceQemu::Dead {
            self.source_qemu = SourceQemu::Dead;
            self.history.source_fault = true;
        }
    }

    /// The next QEMU is about to run the VM.
    pub(crate) fn former_is_killed(&mut self) {
        if self.handed_over {
            self.source_qemu_dies();
        }
    }

    /// Whether the destination has the whole stream, or has loaded the VM: it waits for the source.
    pub(crate) fn arrives(&self) -> bool {
        let waits = self.destination.machine().and_then(destination::Machine::wait);
        let arrives = matches!(waits, Some(Wait::Peer | Wait::Answer));
        arrives && self.streamed && self.destination_qemu != DestinationQemu::Dead
    }

    pub(crate) fn destination_qemu_dies(&mut self) {
        if self.destination_qemu != DestinationQemu::Dead {
            self.destination_qemu = DestinationQemu::Dead;
            self.history.destination_fault = true;
        }
    }

    pub(crate) fn source_restarts(&mut self) {
        self.source = self.source_disk.map_or(Agent::Stranger, |noted| {
            let (machine, actions) =
                source::Machine::restart(id(), noted, self.source_qemu.found());
            Agent::up(machine, actions)
        });
    }

    pub(crate) fn destination_restarts(&mut self) {
        // The record that seemed to have failed is there: the paused VM is its owner's.
        let paused_here = self.destination_disk == Some(destination::Noted::Running);
        if paused_here && self.destination_qemu == DestinationQemu::Loaded {
            self.destination_runs();
        }
        self.destination = self.destination_disk.map_or(Agent::Stranger, |noted| {
            let found = self.destination_qemu.found();
            let (machine, actions) = destination::Machine::restart(id(), noted, found);
            Agent::up(machine, actions)
        });
    }

    /// The violation in this world, if any.
    pub(crate) fn check(&self) -> Option<&'static str> {
        if self.broken.is_some() {
            return self.broken;
        }
        if self.running() > 1 {
            return Some("two QEMUs run the VM");
        }
        if self.is_gone() && !self.may_be_gone() {
            return Some("the VM is gone everywhere, and no fault took it");
        }
        if self.waits_for_reader() {
            return Some("the VM stands still until the destination has read something");
        }
        None
    }

    /// Whether the source sends something before it resumes its VM, which takes as long as the
    /// destination likes.
    fn waits_for_reader(&self) -> bool {
        let Agent::Up { doing, .. } = &self.source else { return false };
        let says = doing.iter().position(|action| matches!(action, source::Action::Send(_)));
        let goes_on =
            doing.iter().position(|action| matches!(action, source::Action::QemuGoOn { .. }));
        matches!((says, goes_on), (Some(says), Some(goes_on)) if says < goes_on)
    }

    /// A VM dies with the side that has it. Between `committed` and running, both have it; so they
    /// do from when the source's QEMU has released it, as far as nothing ends the migration.
    fn may_be_gone(&self) -> bool {
        let History { source_fault, destination_fault, .. } = self.history;
        match self.history {
            History { must_live: true, .. } => self.arrives(),
            History { ended: true, .. } => true,
            History { ran_there: true, .. } => destination_fault,
            History { given: true, .. } => source_fault && destination_fault,
            _ => source_fault,
        }
    }
}

impl World {
    /// The doubts of both sides.
    pub(crate) fn doubts(&self) -> [Option<&Doubt>; 2] {
        [
            self.source.machine().and_then(source::Machine::doubt),
            self.destination.machine().and_then(destination::Machine::doubt),
        ]
    }

    /// The next action of an agent.
    pub(crate) fn doing(&self, side: Side) -> String {
        match (side, &self.source, &self.destination) {
            (Side::Source, Agent::Up { doing, came, .. }, _) => {
                format!("{:?} {:?}", came, doing.front())
            }
            (Side::Destination, _, Agent::Up { doing, came, .. }) => {
                format!("{:?} {:?}", came, doing.front())
            }
            _ => String::new(),
        }
    }
}
