//! What agents do for their machines, as the engine does it.

use std::collections::VecDeque;

use switchover::journal::Side;
use switchover::{Found, destination, source};
use xen::handshake::{Answer, FAILED};

use crate::processes::{ReceivedCopy, Receiver, Xl};
use crate::world::{Mistake, Said, World, id};

/// An agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

pub(crate) type SourceAgent = Agent<source::Machine, source::Action, source::Event>;
pub(crate) type DestinationAgent =
    Agent<destination::Machine, destination::Action, destination::Event>;

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

    /// Whether it is up, and waits for an event.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self, Self::Up { doing, came: None, .. } if doing.is_empty())
    }
}

impl World {
    pub(crate) fn tell_source(&mut self, event: source::Event) -> bool {
        let Agent::Up { machine, doing, .. } = &mut self.source else { return false };
        let before = machine.clone();
        let actions = machine.step(event);
        let changes = !actions.is_empty() || *machine != before;
        doing.extend(actions);
        changes
    }

    pub(crate) fn tell_destination(&mut self, event: destination::Event) -> bool {
        let Agent::Up { machine, doing, .. } = &mut self.destination else { return false };
        let before = machine.clone();
        let actions = machine.step(event);
        let changes = !actions.is_empty() || *machine != before;
        doing.extend(actions);
        changes
    }

    pub(crate) fn restarts(&mut self, side: Side) -> bool {
        match side {
            Side::Source => {
                if self.source != Agent::Down {
                    return false;
                }
                let found = match self.xl {
                    Xl::Destroyed => Found::Missing,
                    Xl::Streaming | Xl::Resumed => Found::Runs,
                    _ => Found::Stopped,
                };
                // xl's transport hands its pipes over again.
                self.is_answered = self.has_xl_exited();
                self.is_offered = self.is_source_noted;
                self.source = self.source_disk.map_or(Agent::Stranger, |noted| {
                    let (machine, actions) = source::Machine::restart(id(), noted, found);
                    Agent::up(machine, actions)
                });
            }
            Side::Destination => {
                if self.destination != Agent::Down {
                    return false;
                }
                let found = match (self.copy, self.destination_disk) {
                    (ReceivedCopy::Running, _) | (_, Some(destination::Noted::Running)) => {
                        Found::Runs
                    }
                    (ReceivedCopy::Paused, _) => Found::Stopped,
                    (ReceivedCopy::None, _) => Found::Missing,
                };
                self.destination = self.destination_disk.map_or(Agent::Stranger, |noted| {
                    let (machine, actions) = destination::Machine::restart(id(), noted, found);
                    Agent::up(machine, actions)
                });
            }
        }
        true
    }

    pub(crate) fn crashes(&mut self, side: Side) -> bool {
        match side {
            Side::Source => {
                !matches!(std::mem::replace(&mut self.source, Agent::Down), Agent::Down)
            }
            Side::Destination => {
                // Its receiver's input and output are closed. One that has failed already destroys
                // its copy long before the agent runs again.
                (self.is_receiver_closed, self.is_receiver_unheard) = (true, true);
                if self.receiver == Receiver::Failing {
                    (self.receiver, self.copy) = (Receiver::Exited, ReceivedCopy::None);
                }
                let before = std::mem::replace(&mut self.destination, Agent::Down);
                !matches!(before, Agent::Down)
            }
        }
    }

    /// Does the source's next action; false if it is still waited for.
    pub(crate) fn source_does(&mut self) -> bool {
        use source::{Action, Event, Record};
        let Agent::Up { doing, came, .. } = &mut self.source else { return false };
        let Some(action) = doing.front().cloned() else {
            let Some(event) = came.take() else { return false };
            self.tell_source(event);
            return true;
        };
        let comes = match action {
            Action::Journal(record) | Action::Note(record) => {
                let unnoted = self.mistake == Mistake::OffersUnnoted
                    && matches!(record, Record::Stopped { .. });
                if !unnoted {
                    self.source_disk = self.source_disk.map(|noted| noted.with(&record));
                    self.is_source_noted = true;
                }
                None
            }
            Action::Forget => {
                self.source_disk = None;
                None
            }
            Action::Send(said) => {
                self.send(Said::by_source(&said.message));
                None
            }
            Action::QemuAwaitCompleted if !self.is_offered => {
                self.is_offered = true;
                self.write(Answer::Ready);
                return true;
            }
            Action::QemuAwaitCompleted => Some(match () {
                () if self.has_permission => Event::Completed,
                () if self.has_xl_exited() => {
                    Event::NotCompleted { reason: "xl has exited".into() }
                }
                () => return false,
            }),
            Action::QemuGoOn { .. } => {
                if self.hand_back() {
                    return true;
                }
                Some(match self.xl {
                    Xl::Streaming | Xl::Resumed => Event::WentOn,
                    Xl::Destroyed => Event::QemuExited,
                    Xl::Stuck => Event::CannotGoOn { reason: "xl has exited".into() },
                    Xl::Suspended | Xl::Permitted | Xl::Failed => return false,
                })
            }
            Action::QemuQuit => {
                if !std::mem::replace(&mut self.is_answered, true) {
                    self.write(Answer::Report { status: 0 });
                    return true;
                }
                match self.xl {
                    // The agent destroys it.
                    Xl::Stuck => self.xl = Xl::Destroyed,
                    Xl::Destroyed => {}
                    _ => return false,
                }
                Some(Event::QemuExited)
            }
            Action::KeepInDoubt(_) | Action::Done(_) => None,
        };
        if let Agent::Up { doing, came, .. } = &mut self.source {
            doing.pop_front();
            *came = comes.or(came.take());
        }
        true
    }

    /// Has xl keep its domain, once.
    pub(crate) fn hand_back(&mut self) -> bool {
        if std::mem::replace(&mut self.is_answered, true) {
            return false;
        }
        self.was_handed_back |= self.is_offered;
        self.write(Answer::Report { status: FAILED.get() });
        self.write(Answer::HandedBack);
        if !self.is_offered || self.mistake == Mistake::ClosesAfterReady {
            self.is_xl_closed = true;
        }
        if self.mistake == Mistake::ClosesAfterReady {
            self.to_xl.retain(|answer| *answer == Answer::Ready);
        }
        true
    }

    fn write(&mut self, answer: Answer) {
        if !self.has_xl_exited() {
            self.to_xl.push_back(answer);
        }
    }

    /// Does the destination's next action; false if it is still waited for.
    pub(crate) fn destination_does(&mut self) -> bool {
        use destination::{Action, Event};
        let Agent::Up { doing, came, .. } = &mut self.destination else { return false };
        let Some(action) = doing.front().cloned() else {
            let Some(event) = came.take() else { return false };
            self.tell_destination(event);
            return true;
        };
        let comes = match action {
            Action::Journal(record) | Action::Note(record) => {
                self.destination_disk = self.destination_disk.map(|noted| noted.with(&record));
                None
            }
            Action::Forget => {
                self.destination_disk = None;
                None
            }
            Action::Send(said) => {
                self.send(Said::by_destination(&said.message));
                None
            }
            Action::QemuCont if !self.is_receiver_unheard && !self.is_permission_written => {
                self.is_permission_written = true;
                return true;
            }
            Action::QemuCont => match self.copy_runs() {
                Some(event) => Some(event),
                None => return false,
            },
            Action::QemuKill => {
                if !std::mem::replace(&mut self.is_receiver_closed, true) {
                    return true;
                }
                if self.receiver != Receiver::Exited {
                    return false;
                }
                self.destroy_copy();
                Some(Event::QemuExited)
            }
            Action::QemuSettle | Action::KeepInDoubt(_) | Action::Done(_) => None,
        };
        if let Agent::Up { doing, came, .. } = &mut self.destination {
            doing.pop_front();
            *came = comes.or(came.take());
        }
        true
    }

    /// What became of the permission; none yet.
    fn copy_runs(&mut self) -> Option<destination::Event> {
        use destination::Event;
        if !self.is_receiver_unheard {
            match self.from_receiver.pop_front() {
                Some(Answer::Report { status: 0 }) => return Some(Event::Runs),
                Some(Answer::Report { .. }) => {
                    let reason = "the receiver has failed".into();
                    return Some(Event::ContFailed { reason, never_ran: true });
                }
                Some(_) => return None,
                None if self.receiver != Receiver::Exited => return None,
                None => {}
            }
            if self.mistake == Mistake::TakesSilenceForFailure {
                let reason = "the receiver has exited".into();
                return Some(Event::ContFailed { reason, never_ran: true });
            }
        }
        // By hand. A receiver that is still there does the same.
        Some(match self.copy {
            ReceivedCopy::None => Event::QemuExited,
            ReceivedCopy::Paused | ReceivedCopy::Running => {
                self.copy = ReceivedCopy::Running;
                Event::Runs
            }
        })
    }

    fn destroy_copy(&mut self) {
        match self.copy {
            ReceivedCopy::Paused => self.copy = ReceivedCopy::None,
            // Its name shows that it does not arrive any more.
            ReceivedCopy::Running if self.mistake == Mistake::TakesSilenceForFailure => {
                self.broken = Some("a copy that runs is destroyed");
            }
            ReceivedCopy::None | ReceivedCopy::Running => {}
        }
    }
}
