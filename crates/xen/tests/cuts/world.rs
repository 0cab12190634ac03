//! xl, both agents, the receiver, and what is between them.

use std::collections::VecDeque;

use xen::handshake::source::{Holder, Outcome};
use xen::handshake::{Answer, FAILED, Reply, Request, destination, source};

use crate::processes::{ReceivedCopy, Receiver, Xl};
use crate::step::Step;

/// What an agent does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mistake {
    None,
    /// The source closes xl's pipes on a cut, also when xl knows that the receiver is ready.
    ClosesAfterReady,
    /// The source answers failure on a cut, also when it has sent the permission.
    GuessesThatItFailed,
    /// The destination takes a receiver that exits without a report for one that has failed.
    TakesSilenceForFailure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Carried {
    Stream,
    Request(Request),
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
    /// What the source's agent has not noticed.
    pub(crate) permission: bool,
    pub(crate) xl_exit: bool,
    pub(crate) is_xl_killed: bool,
    pub(crate) source: source::Machine,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) is_connected: bool,
    pub(crate) forward: VecDeque<Carried>,
    pub(crate) back: VecDeque<Reply>,
    /// Who has not noticed that a connection was cut.
    pub(crate) source_unaware: bool,
    pub(crate) destination_unaware: bool,
    pub(crate) destination: destination::Machine,
    /// The destination's agent destroys the copy.
    pub(crate) destroys: bool,
    pub(crate) receiver: Receiver,
    pub(crate) has_stream: bool,
    pub(crate) is_permitted: bool,
    pub(crate) is_receiver_closed: bool,
    /// What the destination's agent has not read.
    pub(crate) from_receiver: VecDeque<Answer>,
    pub(crate) receiver_exit: bool,
    pub(crate) copy: ReceivedCopy,
    pub(crate) was_handed_back: bool,
    /// Who had the domain according to the source's agent when the connection was cut, if it is.
    pub(crate) at_cut: Option<Holder>,
    pub(crate) broken: Option<&'static str>,
}

impl World {
    /// The start of a migration.
    pub(crate) fn new(mistake: Mistake, faults: u8) -> Self {
        Self {
            mistake,
            faults_left: faults,
            xl: Xl::Starting,
            to_xl: VecDeque::new(),
            is_xl_closed: false,
            permission: false,
            xl_exit: false,
            is_xl_killed: false,
            source: source::Machine::default(),
            outcome: None,
            is_connected: true,
            forward: VecDeque::new(),
            back: VecDeque::new(),
            source_unaware: false,
            destination_unaware: false,
            destination: destination::Machine::default(),
            destroys: false,
            receiver: Receiver::Starting,
            has_stream: false,
            is_permitted: false,
            is_receiver_closed: false,
            from_receiver: VecDeque::new(),
            receiver_exit: false,
            copy: ReceivedCopy::None,
            was_handed_back: false,
            at_cut: None,
            broken: None,
        }
    }

    pub(crate) fn holder(&self) -> Holder {
        self.source.holder()
    }

    fn runs_at_source(&self) -> bool {
        matches!(self.xl, Xl::Starting | Xl::Streaming | Xl::Resumed)
    }

    pub(crate) fn violation(&self) -> Option<&'static str> {
        if self.runs_at_source() && self.copy == ReceivedCopy::Running {
            return Some("both hosts run the domain");
        }
        self.broken
    }

    /// The violation if nothing is left to happen.
    pub(crate) fn violation_when_settled(&self) -> Option<&'static str> {
        let (here, there) = (self.runs_at_source(), self.copy == ReceivedCopy::Running);
        if self.copy == ReceivedCopy::Paused {
            return Some("a copy is left");
        }
        if !here && !there {
            // Nobody else can resume its domain.
            return (!self.is_xl_killed).then_some("the domain runs nowhere");
        }
        if self.destination.runs() != there {
            return Some("the destination is wrong about its copy");
        }
        match (self.at_cut, self.outcome) {
            (Some(Holder::Source), _) if there => Some("the domain moved after a cut"),
            (Some(Holder::Destination), _) if here => Some("the domain stayed after a cut"),
            (_, None) => Some("the source's agent waits for nothing"),
            (_, Some(outcome)) if (outcome == Outcome::Moved) != there => {
                Some("the source is wrong about the copy")
            }
            _ => None,
        }
    }

    /// Takes a step, if it is possible now.
    pub(crate) fn take(&mut self, step: Step) -> bool {
        if step.is_fault() {
            let Some(left) = self.faults_left.checked_sub(1) else { return false };
            self.faults_left = left;
        }
        match step {
            Step::XlReads => self.xl_reads(),
            Step::XlStreams => self.xl_streams(),
            Step::SourceReads => {
                std::mem::take(&mut self.permission) && self.source(source::Event::Permission)
            }
            Step::SourceSeesExit => {
                !self.permission
                    && std::mem::take(&mut self.xl_exit)
                    && self.source(source::Event::XlExited)
            }
            Step::SourceNotices => {
                std::mem::take(&mut self.source_unaware) && self.source_notices()
            }
            Step::Connects => self.connects(),
            Step::ForwardArrives => self.forward_arrives(),
            Step::BackArrives => {
                let reply = self.back.pop_front();
                reply.is_some_and(|reply| self.source(source::Event::Received(reply)))
            }
            Step::DestinationReads => {
                let answer = self.from_receiver.pop_front();
                answer.is_some_and(|it| self.destination(destination::Event::Answered(it)))
            }
            Step::DestinationSeesExit => {
                self.from_receiver.is_empty()
                    && std::mem::take(&mut self.receiver_exit)
                    && self.destination(destination::Event::ReceiverExited)
            }
            Step::DestinationNotices => {
                std::mem::take(&mut self.destination_unaware)
                    && self.destination(destination::Event::ConnectionLost)
            }
            Step::CopyIsDestroyed => std::mem::take(&mut self.destroys) && self.copy_is_destroyed(),
            Step::ReceiverGoesOn => self.receiver_goes_on(),
            Step::Cut => self.cut(),
            Step::XlCannotRename => {
                self.xl == Xl::Suspended
                    && self.to_xl.pop_front() == Some(Answer::Ready)
                    && self.xl_exits(Xl::Resumed)
            }
            Step::XlIsKilled => {
                self.is_xl_killed = true;
                matches!(self.xl, Xl::Permitted | Xl::Failed) && self.xl_exits(Xl::Stuck)
            }
            Step::SourceCancels => self.source(source::Event::Cancel),
            Step::DestinationCancels => self.destination(destination::Event::Cancel),
            Step::ReceiverCannotUnpause => {
                self.receiver == Receiver::Loaded
                    && self.is_permitted
                    && self.receiver_fails(FAILED.get())
            }
            Step::ReceiverIsKilled => self.receiver != Receiver::Exited && self.receiver_exits(),
        }
    }

    fn source(&mut self, event: source::Event) -> bool {
        for action in self.source.step(event) {
            match action {
                source::Action::Write(answer) => self.answer_xl(answer),
                source::Action::CloseXl => self.is_xl_closed = true,
                source::Action::Send(request) if self.is_connected => {
                    self.forward.push_back(Carried::Request(request));
                }
                source::Action::Send(_) => {}
                source::Action::Done(outcome) => self.outcome = Some(outcome),
            }
        }
        true
    }

    fn answer_xl(&mut self, answer: Answer) {
        self.was_handed_back |= answer == Answer::HandedBack;
        if !self.is_xl_closed {
            self.to_xl.push_back(answer);
        }
    }

    fn source_notices(&mut self) -> bool {
        match self.mistake {
            Mistake::ClosesAfterReady => self.is_xl_closed = true,
            Mistake::GuessesThatItFailed if self.holder() == Holder::AskDestination => {
                self.answer_xl(Answer::Report { status: FAILED.get() });
                self.answer_xl(Answer::HandedBack);
            }
            _ => {}
        }
        self.source(source::Event::ConnectionLost)
    }

    fn cut(&mut self) -> bool {
        if !self.is_connected {
            return false;
        }
        self.is_connected = false;
        self.forward.clear();
        self.back.clear();
        (self.source_unaware, self.destination_unaware) = (true, true);
        self.at_cut = Some(self.holder());
        true
    }

    /// The source connects again only if it must ask. The destination may not have noticed the cut.
    fn connects(&mut self) -> bool {
        if self.is_connected || self.source_unaware || self.holder() != Holder::AskDestination {
            return false;
        }
        self.is_connected = true;
        self.at_cut = None;
        self.source(source::Event::Connected)
    }

    fn forward_arrives(&mut self) -> bool {
        match self.forward.pop_front() {
            Some(Carried::Stream) => self.has_stream = true,
            Some(Carried::Request(request)) => {
                self.destination(destination::Event::Received(request));
            }
            None => return false,
        }
        true
    }

    fn destination(&mut self, event: destination::Event) -> bool {
        for action in self.destination.step(event) {
            match action {
                destination::Action::Permit => self.is_permitted = true,
                destination::Action::CloseReceiver => self.is_receiver_closed = true,
                destination::Action::FindCopy => {
                    let guesses = self.mistake == Mistake::TakesSilenceForFailure;
                    let runs = self.copy == ReceivedCopy::Running && !guesses;
                    self.destination(destination::Event::CopyFound { runs });
                }
                destination::Action::DestroyCopy => self.destroys = true,
                destination::Action::Send(reply) if self.is_connected => {
                    self.back.push_back(reply);
                }
                destination::Action::Send(_) => {}
            }
        }
        true
    }

    fn copy_is_destroyed(&mut self) -> bool {
        if self.copy == ReceivedCopy::Running {
            self.broken = Some("a copy that runs is destroyed");
        }
        self.copy = ReceivedCopy::None;
        self.destination(destination::Event::CopyDestroyed)
    }
}
