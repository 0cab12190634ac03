//! xl, both agents with their journals, the receiver, and what is between them.

use std::collections::VecDeque;

use switchover::journal::Side;
use switchover::{Doubt, Envelope, MigrationId, ToDestination, ToSource, destination, source};
use xen::handshake::Answer;

use crate::agents::{Agent, DestinationAgent, SourceAgent};
use crate::processes::{ReceivedCopy, Receiver, Xl};
use crate::step::Step;

/// More steps than a calm world takes.
const CALM_STEPS_MAX: usize = 500;
/// How often both sides' waits end in a calm world: each lost message is sent again by then.
const CALM_ROUNDS: usize = 6;

/// The migration's id.
pub(crate) fn id() -> MigrationId {
    thread_local! {
        static ID: MigrationId = MigrationId::new("m").unwrap();
    }
    ID.with(Clone::clone)
}

/// What an agent does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mistake {
    None,
    /// The source closes xl's pipes also when xl knows that the receiver is ready.
    ClosesAfterReady,
    /// The source does not note that xl may get "ready".
    OffersUnnoted,
    /// The source answers failure when the destination does not answer.
    GuessesThatItFailed,
    /// The destination takes a receiver that exits without a report for one that has failed.
    TakesSilenceForFailure,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Said {
    Go,
    Aborted,
    UnknownHere,
    Loaded,
    Running,
    Refused,
    Lost,
    UnknownThere,
}

impl Said {
    pub(crate) const ALL: [Self; 8] = [
        Self::Go,
        Self::Aborted,
        Self::UnknownHere,
        Self::Loaded,
        Self::Running,
        Self::Refused,
        Self::Lost,
        Self::UnknownThere,
    ];

    pub(crate) fn by_source(message: &ToDestination) -> Self {
        match message {
            ToDestination::Go { .. } => Self::Go,
            ToDestination::Aborted { .. } => Self::Aborted,
            ToDestination::Unknown => Self::UnknownHere,
        }
    }

    pub(crate) fn by_destination(message: &ToSource) -> Self {
        match message {
            ToSource::Loaded => Self::Loaded,
            ToSource::Running => Self::Running,
            ToSource::Refused { .. } => Self::Refused,
            ToSource::Lost { .. } => Self::Lost,
            ToSource::Unknown => Self::UnknownThere,
        }
    }

    fn to_destination(self) -> Option<ToDestination> {
        let reason = || "said".into();
        match self {
            Self::Go => Some(ToDestination::Go { run: true }),
            Self::Aborted => Some(ToDestination::Aborted { reason: reason() }),
            Self::UnknownHere => Some(ToDestination::Unknown),
            _ => None,
        }
    }

    fn to_source(self) -> Option<ToSource> {
        let reason = || "said".into();
        match self {
            Self::Loaded => Some(ToSource::Loaded),
            Self::Running => Some(ToSource::Running),
            Self::Refused => Some(ToSource::Refused { reason: reason() }),
            Self::Lost => Some(ToSource::Lost { reason: reason() }),
            Self::UnknownThere => Some(ToSource::Unknown),
            _ => None,
        }
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The state of everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) mistake: Mistake,
    pub(crate) faults_left: u8,
    pub(crate) xl: Xl,
    /// What xl has not read.
    pub(crate) to_xl: VecDeque<Answer>,
    pub(crate) is_xl_closed: bool,
    /// xl has written its permission.
    pub(crate) has_permission: bool,
    is_xl_killed: bool,
    pub(crate) source: SourceAgent,
    pub(crate) source_disk: Option<source::Noted>,
    /// The source's journal has a record.
    pub(crate) is_source_noted: bool,
    /// xl may have been given "ready".
    pub(crate) is_offered: bool,
    /// xl has been given its last answer.
    pub(crate) is_answered: bool,
    pub(crate) was_handed_back: bool,
    pub(crate) destination: DestinationAgent,
    pub(crate) destination_disk: Option<destination::Noted>,
    pub(crate) receiver: Receiver,
    pub(crate) has_stream: bool,
    pub(crate) is_permission_written: bool,
    pub(crate) is_receiver_closed: bool,
    /// The agent that started the receiver has ended.
    pub(crate) is_receiver_unheard: bool,
    /// What the destination's agent has not read.
    pub(crate) from_receiver: VecDeque<Answer>,
    pub(crate) copy: ReceivedCopy,
    /// A bit for each message that was ever sent.
    said: u8,
    /// Messages in flight, in order; only in a calm world.
    mail: Option<VecDeque<Said>>,
    pub(crate) broken: Option<&'static str>,
}

impl World {
    /// The start of a migration: both journals are open, and xl streams.
    pub(crate) fn new(mistake: Mistake, faults: u8) -> Self {
        Self {
            mistake,
            faults_left: faults,
            xl: Xl::Streaming,
            to_xl: VecDeque::new(),
            is_xl_closed: false,
            has_permission: false,
            is_xl_killed: false,
            source: Agent::up(source::Machine::new(id(), true), Vec::new()),
            source_disk: Some(source::Noted::opened(true)),
            is_source_noted: false,
            is_offered: false,
            is_answered: false,
            was_handed_back: false,
            destination: Agent::up(destination::Machine::new(id()), Vec::new()),
            destination_disk: Some(destination::Noted::Opened),
            receiver: Receiver::Receiving,
            has_stream: false,
            is_permission_written: false,
            is_receiver_closed: false,
            is_receiver_unheard: false,
            from_receiver: VecDeque::new(),
            copy: ReceivedCopy::None,
            said: 0,
            mail: None,
            broken: None,
        }
    }

    /// Whether the source's agent reads xl's stream.
    pub(crate) fn source_leads(&self) -> bool {
        let is_new = self.source_disk == Some(source::Noted::opened(true));
        is_new && !self.is_answered && self.source.is_idle()
    }

    /// Whether the destination's agent passes it to the receiver.
    pub(crate) fn destination_receives(&self) -> bool {
        let is_new = self.destination_disk == Some(destination::Noted::Opened);
        let reads = self.receiver == Receiver::Receiving && !self.is_receiver_closed;
        is_new && reads && self.destination.is_idle()
    }

    pub(crate) fn is_committed(&self) -> bool {
        matches!(self.source_disk, Some(noted) if noted.phase == source::Phase::Committed)
    }

    pub(crate) fn is_permitted(&self) -> bool {
        self.is_permission_written
    }

    pub(crate) fn send(&mut self, said: Said) {
        self.said |= said.bit();
        if let Some(mail) = &mut self.mail {
            mail.push_back(said);
        }
    }

    fn runs_at_source(&self) -> bool {
        matches!(self.xl, Xl::Streaming | Xl::Resumed)
    }

    pub(crate) fn violation(&self) -> Option<&'static str> {
        if self.runs_at_source() && self.copy == ReceivedCopy::Running {
            return Some("both hosts run the domain");
        }
        self.broken
    }

    /// The violation once everything has been delivered and done.
    pub(crate) fn violation_when_calm(&self) -> Option<&'static str> {
        let (here, there) = (self.runs_at_source(), self.copy == ReceivedCopy::Running);
        let doubts = [
            self.source.machine().and_then(source::Machine::doubt),
            self.destination.machine().and_then(destination::Machine::doubt),
        ];
        if !here && !there {
            // Nobody else can resume the domain of an xl that was killed. One that may have run at
            // the destination is not resumed without an operator. Both are shown.
            let [doubt, _] = doubts;
            let is_killed = self.is_xl_killed && doubts.iter().any(Option::is_some);
            let is_shown = is_killed || matches!(doubt, Some(Doubt::LostThere { .. }));
            return (!is_shown).then_some("the domain runs nowhere");
        }
        if self.copy == ReceivedCopy::Paused {
            return Some("a copy is left");
        }
        if self.source_disk.is_some() || self.destination_disk.is_some() {
            return Some("a journal is left");
        }
        None
    }

    /// Takes a step, if it is possible now.
    pub(crate) fn take(&mut self, step: Step) -> bool {
        if step.is_fault() {
            let Some(left) = self.faults_left.checked_sub(1) else { return false };
            self.faults_left = left;
        }
        let reason = || "it fails".into();
        match step {
            Step::Does(Side::Source) => self.source_does(),
            Step::Does(Side::Destination) => self.destination_does(),
            Step::Hears(said) => self.said & said.bit() != 0 && self.hears(said),
            Step::XlReads => self.xl_reads(),
            Step::XlStreams => self.xl_streams(),
            Step::ReceiverGoesOn => self.receiver_goes_on(),
            Step::StreamEnds => self.stream_ends(),
            Step::Loads => self.loads(),
            Step::Breaks(side) => self.is_stream_lost() && self.gives_up(side),
            Step::Restarts(side) => self.restarts(side),
            Step::Crashes(side) => self.crashes(side),
            Step::GivesUp(side) => self.gives_up(side),
            Step::Late(side) => self.is_late(side),
            Step::ReleaseTimesOut => {
                let waits = matches!(
                    &self.source,
                    Agent::Up { doing, .. }
                        if doing.front() == Some(&source::Action::QemuAwaitCompleted)
                );
                if !waits || !self.is_offered {
                    return false;
                }
                if let Agent::Up { doing, came, .. } = &mut self.source {
                    doing.pop_front();
                    *came = Some(source::Event::NotCompleted { reason: reason() });
                }
                true
            }
            Step::XlIsKilled => {
                let waits = matches!(self.xl, Xl::Permitted | Xl::Failed);
                if waits {
                    (self.xl, self.is_xl_killed) = (Xl::Stuck, true);
                    self.to_xl.clear();
                }
                waits
            }
            Step::ReceiverIsKilled => {
                let was = std::mem::replace(&mut self.receiver, Receiver::Exited);
                was != Receiver::Exited
            }
            Step::ReceiverCannotUnpause => {
                let waits = self.receiver == Receiver::Loaded && self.is_permission_written;
                if waits {
                    self.receiver_fails(3);
                }
                waits
            }
        }
    }

    /// The stream will not arrive, which both sides see.
    fn is_stream_lost(&self) -> bool {
        let arrives =
            self.xl == Xl::Streaming && self.source_leads() && self.destination_receives();
        let has_failed = self.receiver == Receiver::Exited && self.copy == ReceivedCopy::None;
        !self.has_stream && !arrives || has_failed
    }

    fn gives_up(&mut self, side: Side) -> bool {
        let reason = "it fails".into();
        match side {
            Side::Source if self.source.is_idle() => {
                self.tell_source(source::Event::GiveUp { reason })
            }
            Side::Destination if self.destination.is_idle() => {
                self.tell_destination(destination::Event::GiveUp { reason })
            }
            _ => false,
        }
    }

    fn is_late(&mut self, side: Side) -> bool {
        match side {
            Side::Source if self.source.is_idle() => {
                let guesses = self.mistake == Mistake::GuessesThatItFailed && self.is_committed();
                if guesses {
                    return self.hand_back();
                }
                self.tell_source(source::Event::Timeout)
            }
            Side::Destination if self.destination.is_idle() => {
                self.tell_destination(destination::Event::Timeout)
            }
            _ => false,
        }
    }

    /// All of the stream is sent: xl may get "ready" once the destination has it.
    fn stream_ends(&mut self) -> bool {
        let is_new = self.source_disk == Some(source::Noted::opened(true)) && !self.is_offered;
        let can = self.has_stream && self.xl == Xl::Suspended && is_new && self.source.is_idle();
        can && self.tell_source(source::Event::Stopped { run: true })
    }

    fn loads(&mut self) -> bool {
        if !self.destination.is_idle() || self.from_receiver.front() != Some(&Answer::Ready) {
            return false;
        }
        self.from_receiver.pop_front();
        self.tell_destination(destination::Event::Loaded);
        true
    }

    fn hears(&mut self, said: Said) -> bool {
        if let Some(message) = said.to_destination() {
            let said = Envelope { migration: id(), message };
            return match &self.destination {
                Agent::Stranger => {
                    let answer = said.answer_without_journal();
                    answer.is_some_and(|answer| {
                        self.send(Said::by_destination(&answer.message));
                        true
                    })
                }
                agent if agent.is_idle() => {
                    self.tell_destination(destination::Event::Received(said))
                }
                _ => false,
            };
        }
        let Some(message) = said.to_source() else { return false };
        // The engine takes "loaded" for true only when it has sent everything.
        let notes = self.mistake != Mistake::OffersUnnoted;
        if message == ToSource::Loaded && !self.is_source_noted && notes {
            let is_new = self.source_disk == Some(source::Noted::opened(true));
            if is_new && self.source.machine().is_some() {
                return false;
            }
        }
        let said = Envelope { migration: id(), message };
        match &self.source {
            Agent::Stranger => {
                let answer = said.answer_without_journal();
                answer.is_some_and(|answer| {
                    self.send(Said::by_source(&answer.message));
                    true
                })
            }
            agent if agent.is_idle() => self.tell_source(source::Event::Received(said)),
            _ => false,
        }
    }

    /// Takes the first usual step that changes something.
    pub(crate) fn takes_one(&mut self) -> bool {
        let messages = Said::ALL.into_iter().map(Step::Hears);
        Step::USUAL.into_iter().chain(messages).any(|step| self.take(step))
    }

    /// Both agents run, messages arrive, and waits end, until nothing changes any more.
    pub(crate) fn calm_down(&mut self) {
        (self.mail, self.said) = (Some(VecDeque::new()), 0);
        for _ in 0..CALM_ROUNDS {
            for steps in 0.. {
                if steps > CALM_STEPS_MAX {
                    self.broken = Some("it never becomes calm");
                    return;
                }
                if Step::USUAL.into_iter().any(|step| self.take(step)) {
                    continue;
                }
                match self.mail.as_mut().and_then(VecDeque::pop_front) {
                    Some(said) => {
                        self.hears(said);
                    }
                    None => break,
                }
            }
            for side in [Side::Source, Side::Destination] {
                self.is_late(side);
            }
        }
    }
}
