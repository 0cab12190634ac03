//! The destination's side: it has a receiver, and knows what became of its copy.

use std::num::NonZeroU8;

use super::{Answer, FAILED, Reply, Request};

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The source's agent sent a message.
    Received(Request),
    /// The receiver wrote an answer.
    Answered(Answer),
    /// The receiver has closed its output, and exited.
    ReceiverExited,
    /// The result of [`Action::FindCopy`].
    CopyFound {
        /// Whether the copy runs.
        runs: bool,
    },
    /// The result of [`Action::DestroyCopy`]: there is no copy.
    CopyDestroyed,
    /// The connection to the source's agent is lost.
    ConnectionLost,
    /// A wait has timed out, or something failed here.
    Cancel,
}

/// An action. A step's actions are done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write the permission to the receiver.
    Permit,
    /// Close the receiver's input, and go on reading its output: a receiver whose output is closed
    /// too exits before it has destroyed its copy.
    CloseReceiver,
    /// Find out whether the copy runs, with its own name or with `--incoming` after it.
    FindCopy,
    /// Destroy the copy, whatever its name, if there is one.
    DestroyCopy,
    /// Send the message. It may be lost.
    Send(Reply),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum State {
    #[default]
    Receiving,
    /// The receiver waits for the permission.
    Loaded,
    /// The receiver has the permission: only it knows whether the copy runs.
    Permitted,
    /// The receiver has exited and did not report.
    Finding,
    /// The receiver will not run its copy, and exits.
    Closing {
        status: NonZeroU8,
    },
    /// The receiver has exited, and its copy is made sure to be gone.
    Destroying {
        status: NonZeroU8,
    },
    Runs,
    Refused {
        status: NonZeroU8,
    },
}

/// The destination of one migration, from the start of its receiver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Machine {
    state: State,
}

impl Machine {
    /// Whether the copy runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.state == State::Runs
    }

    /// The actions that follow from an event.
    #[must_use = "what a machine wants done must be done"]
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Receiving, Event::Answered(Answer::Banner)) => {
                vec![Action::Send(Reply::Banner)]
            }
            (State::Receiving, Event::Answered(Answer::Ready)) => {
                self.enter(State::Loaded, Action::Send(Reply::Ready))
            }
            (State::Loaded, Event::Received(Request::Check)) => vec![Action::Send(Reply::Present)],
            (State::Loaded, Event::Received(Request::Permission)) => {
                self.enter(State::Permitted, Action::Permit)
            }
            (State::Permitted, Event::Answered(Answer::Report { status: 0 }))
            | (State::Finding, Event::CopyFound { runs: true }) => {
                self.enter(State::Runs, Action::Send(Reply::Runs))
            }
            (State::Permitted, Event::ReceiverExited) => {
                self.enter(State::Finding, Action::FindCopy)
            }
            (
                State::Receiving | State::Loaded | State::Permitted,
                Event::Answered(Answer::Report { status }),
            ) => {
                let status = NonZeroU8::new(status).unwrap_or(FAILED);
                self.enter(State::Closing { status }, Action::CloseReceiver)
            }
            (
                State::Receiving | State::Loaded,
                Event::ConnectionLost | Event::Cancel | Event::Received(Request::Cancel),
            ) => self.enter(State::Closing { status: FAILED }, Action::CloseReceiver),
            (State::Receiving | State::Loaded, Event::ReceiverExited)
            | (State::Finding, Event::CopyFound { runs: false }) => self.destroy(FAILED),
            (State::Closing { status }, Event::ReceiverExited) => self.destroy(status),
            (State::Destroying { status }, Event::CopyDestroyed) => {
                self.enter(State::Refused { status }, Action::Send(Reply::Refused { status }))
            }
            (State::Runs, Event::Received(Request::Check | Request::Permission)) => {
                vec![Action::Send(Reply::Runs)]
            }
            (State::Refused { status }, Event::Received(Request::Check | Request::Permission)) => {
                vec![Action::Send(Reply::Refused { status })]
            }
            _ => Vec::new(),
        }
    }

    fn destroy(&mut self, status: NonZeroU8) -> Vec<Action> {
        self.enter(State::Destroying { status }, Action::DestroyCopy)
    }

    fn enter(&mut self, state: State, action: Action) -> Vec<Action> {
        self.state = state;
        vec![action]
    }
}
