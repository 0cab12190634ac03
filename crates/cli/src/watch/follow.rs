//! Follows a migration or a gang until it ends or the user leaves.

use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use client::{Client, Operation, Problem};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::signals::Signals;
use super::states::States;
use crate::output::eprint_line;

/// The exit code that a shell expects of a command that Ctrl-C ended.
pub(super) const INTERRUPTED: u8 = 130;
/// How long a user who leaves waits for the agent to accept the cancellation.
const ASK_MAX: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 1 });

/// The display of an operation while it runs.
pub(crate) trait Shown {
    /// The operation's state.
    type State: DeserializeOwned;
    /// The message when the operation is cancelled.
    const CANCELLING: &str;
    /// The message when the agent ends before the operation.
    const LOST: &str;
    /// What follows the message when the connection to the agent breaks, which may run on.
    const UNSEEN: &str;

    fn show(&mut self, state: &Self::State);
    /// Prints a message next to the progress.
    fn say(&self, text: &str);
    fn is_over(state: &Self::State) -> bool;
}

pub(crate) enum Followed<T> {
    /// The operation has ended, with any outcome.
    Ended(Box<T>),
    /// The user left.
    Left {
        /// The agent's answer to the cancellation.
        said: Said,
    },
}

/// An agent's answer to the request to cancel an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Nothing yet.
    Nothing,
    /// The operation is being cancelled.
    Yes,
    /// It is too late.
    No,
}

impl From<&Result<(), Problem>> for Said {
    fn from(answer: &Result<(), Problem>) -> Self {
        match answer {
            Ok(()) => Self::Yes,
            Err(Problem::Refused(_)) => Self::No,
            Err(_) => Self::Nothing,
        }
    }
}

/// Tells a user who leaves what becomes of the operation.
pub(crate) fn leave(operation: &Operation, said: Said) -> ExitCode {
    let (noun, capital, id) = match operation {
        Operation::Migration(id) => ("migration", "Migration", id),
        Operation::Gang(id) => ("gang", "Gang", id),
    };
    let becomes = match said {
        Said::Yes => {
            format!("{capital} {id} is being cancelled; `droveway report {id}` shows how it ended")
        }
        Said::No => {
            format!(
                "It is too late to cancel {noun} {id}: `droveway report {id}` shows how it ended"
            )
        }
        Said::Nothing => format!(
            "The agent has not answered: {noun} {id} may continue. `droveway cancel {id}` tries \
             again"
        ),
    };
    eprint_line(format_args!("droveway: no longer watching. {becomes}"));
    ExitCode::from(INTERRUPTED)
}

/// Shows an operation until it ends.
///
/// The first signal cancels it. The second stops watching, even if the agent has not answered the
/// cancellation.
pub(crate) async fn follow<S: Shown>(
    client: &Client,
    operation: &Operation,
    signals: &mut Signals,
    display: &mut S,
) -> Result<Followed<S::State>, Problem> {
    let path = &operation.path();
    let mut states = States::new(client, path);
    // The agent's answer, once it was asked to cancel.
    let mut said: Option<Said> = None;
    let mut cancelling = std::pin::pin!(None);
    loop {
        tokio::select! {
            // A signal doesn't wait for states, of which there may be many.
            biased;
            () = signals.next() => match said {
                None => {
                    said = Some(Said::Nothing);
                    display.say(S::CANCELLING);
                    cancelling.set(Some(client.cancel(path)));
                }
                Some(mut said) => {
                    // The agent must receive the cancellation even if the second signal follows
                    // at once.
                    if cancelling.is_some() {
                        let answered = timeout(ASK_MAX, answer(cancelling.as_mut())).await;
                        said = answered.as_ref().map_or(Said::Nothing, Said::from);
                    }
                    return Ok(Followed::Left { said });
                }
            },
            answer = answer(cancelling.as_mut()) => {
                cancelling.set(None);
                said = Some(Said::from(&answer));
                match answer {
                    Ok(()) => {}
                    // Past the point of no return: the VM arrives. Or there are too many requests.
                    Err(Problem::Refused(why) | Problem::NotNow(why)) => {
                        display.say(&format!("Not cancelled: {why}"));
                    }
                    Err(problem) => return Err(unseen::<S>(problem)),
                }
            }
            state = states.next::<S::State>() => match state.map_err(unseen::<S>)? {
                Some(state) => {
                    display.show(&state);
                    if S::is_over(&state) {
                        return Ok(Followed::Ended(Box::new(state)));
                    }
                }
                None => return Err(Problem::Refused(S::LOST.to_owned())),
            },
        }
    }
}

/// A lost connection says nothing of the operation, so the command prints where to look.
fn unseen<S: Shown>(problem: Problem) -> Problem {
    match problem {
        Problem::Lost { .. }
        | Problem::NoAgent(_)
        | Problem::Unreached { .. }
        | Problem::Insecure { .. } => Problem::Refused(format!("{problem}. {}", S::UNSEEN)),
        problem => problem,
    }
}

/// The result of a request; pending for ever if there is none.
async fn answer<T>(request: Pin<&mut Option<impl Future<Output = T>>>) -> T {
    match request.as_pin_mut() {
        Some(request) => request.await,
        None => std::future::pending().await,
    }
}
