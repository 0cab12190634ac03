//! The source's side: it answers xl.

use std::num::NonZeroU8;

use super::{Answer, FAILED, Reply, Request};

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The destination's agent sent a message.
    Received(Reply),
    /// xl has written its permission. Its domain is suspended, and xl waits for a report.
    Permission,
    /// xl has exited.
    XlExited,
    /// The connection to the destination's agent is lost.
    ConnectionLost,
    /// The destination's agent is connected again.
    Connected,
    /// The operator cancels, a wait has timed out, or the stream can't be carried.
    Cancel,
}

/// An action. A step's actions are done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write the answer to xl.
    Write(Answer),
    /// Close xl's pipes: xl resumes its domain.
    CloseXl,
    /// Send the message. It may be lost.
    Send(Request),
    /// The handshake has ended.
    Done(Outcome),
}

/// How the handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The domain is still the source's: xl resumes it, or has.
    Stays,
    /// The copy runs, and xl destroys its domain.
    Moved,
    /// No copy runs, and xl exited before it could resume its domain, which is suspended and has a
    /// name that ends in `--migratedaway`.
    Suspended,
}

/// Who has the domain if the connection is cut now, and is not made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The source.
    Source,
    /// The destination.
    Destination,
    /// The destination if it received the permission, otherwise the source: it must be asked.
    AskDestination,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum State {
    /// xl sends its stream, or waits until the receiver has the domain.
    #[default]
    Streaming,
    /// xl knows that the receiver has the domain: from here on xl resumes its own only if it is
    /// handed back, and not if its pipes are closed.
    Offered,
    /// The domain is handed back once xl has written its permission.
    Refusing {
        status: NonZeroU8,
    },
    /// xl has written its permission. The destination is asked whether it is there.
    Checking,
    /// The permission was sent. Only the destination's answer ends that.
    Committed,
    Over(Outcome),
}

/// The source of one migration, from the moment when xl starts its transport.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Machine {
    state: State,
    xl_exited: bool,
}

impl Machine {
    /// Who has the domain if the connection is cut now.
    #[must_use]
    pub fn holder(&self) -> Holder {
        match self.state {
            State::Committed => Holder::AskDestination,
            State::Over(Outcome::Moved) => Holder::Destination,
            _ => Holder::Source,
        }
    }

    /// The actions that follow from an event.
    #[must_use = "what a machine wants done must be done"]
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Streaming, Event::Received(Reply::Banner)) => {
                vec![Action::Write(Answer::Banner)]
            }
            (State::Streaming, Event::Received(Reply::Ready)) => {
                self.state = State::Offered;
                vec![Action::Write(Answer::Ready)]
            }
            (State::Offered, Event::Permission) => {
                self.state = State::Checking;
                vec![Action::Send(Request::Check)]
            }
            (State::Checking, Event::Received(Reply::Present)) => {
                self.state = State::Committed;
                vec![Action::Send(Request::Permission)]
            }
            (State::Committed, Event::Connected) => vec![Action::Send(Request::Permission)],
            (State::Committed, Event::Received(Reply::Runs)) => {
                self.over(Outcome::Moved, [Action::Write(Answer::Report { status: 0 })])
            }
            (State::Checking | State::Committed, Event::XlExited) => {
                self.xl_exited = true;
                Vec::new()
            }
            (State::Committed, Event::ConnectionLost | Event::Cancel) => Vec::new(),
            (State::Refusing { status }, Event::Permission) => self.hand_back(status),
            (_, Event::Received(Reply::Refused { status })) => self.keep(status),
            (_, Event::ConnectionLost | Event::Cancel) => self.keep(FAILED),
            (State::Streaming | State::Offered | State::Refusing { .. }, Event::XlExited) => {
                self.over(Outcome::Stays, [Action::Send(Request::Cancel)])
            }
            _ => Vec::new(),
        }
    }

    /// Keeps the domain, in a way that has xl resume it.
    fn keep(&mut self, status: NonZeroU8) -> Vec<Action> {
        let cancel = Action::Send(Request::Cancel);
        match self.state {
            State::Streaming => self.over(Outcome::Stays, [Action::CloseXl, cancel]),
            State::Offered => {
                self.state = State::Refusing { status };
                vec![cancel]
            }
            State::Checking | State::Committed => {
                let mut actions = self.hand_back(status);
                actions.push(cancel);
                actions
            }
            State::Refusing { .. } | State::Over(_) => Vec::new(),
        }
    }

    /// Answers xl as a receiver that has failed.
    fn hand_back(&mut self, status: NonZeroU8) -> Vec<Action> {
        if self.xl_exited {
            return self.over(Outcome::Suspended, []);
        }
        let report = Answer::Report { status: status.get() };
        self.over(Outcome::Stays, [report, Answer::HandedBack].map(Action::Write))
    }

    fn over<const N: usize>(&mut self, outcome: Outcome, actions: [Action; N]) -> Vec<Action> {
        self.state = State::Over(outcome);
        actions.into_iter().chain([Action::Done(outcome)]).collect()
    }
}
