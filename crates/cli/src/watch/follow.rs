//! Follows a migration or a gang until it ends, or the person leaves.

use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::signals::Signals;
use crate::client::Client;
use crate::operation::Operation;
use crate::problem::Problem;

/// What a shell expects of a command that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// Whoever leaves without waiting waits this long for the agent to hear it.
const ASK_MAX: Duration = Duration::from_secs(1);

/// Something that goes on, and is shown while it does.
pub(crate) trait Shown {
    /// Where it is.
    type State: DeserializeOwned;
    /// What is said when it is told to end.
    const CANCELLING: &str;
    /// What is said when its agent ends before it does.
    const LOST: &str;

    fn show(&mut self, state: &Self::State);
    /// A word between.
    fn say(&self, text: &str);
    fn is_over(state: &Self::State) -> bool;
}

pub(crate) enum Followed<T> {
    /// It has ended, one way or the other.
    Ended(Box<T>),
    /// The person went away, after the agent heard that it is to cancel, or
    /// not.
    Left {
        /// Whether it did.
        heard: bool,
    },
}

/// Says what comes of an operation whose person went away.
pub(crate) fn leave(operation: &Operation, heard: bool) -> ExitCode {
    let (noun, capital, id) = match operation {
        Operation::Migration(id) => ("migration", "Migration", id),
        Operation::Gang(id) => ("gang", "Gang", id),
    };
    let said = if heard {
        format!("{capital} {id} is being cancelled; `droveway report {id}` says how it ends")
    } else {
        format!(
            "The agent has not answered: {noun} {id} may go on. `droveway cancel {id}` asks again"
        )
    };
    eprintln!("droveway: no longer watching. {said}");
    ExitCode::from(INTERRUPTED)
}

/// Shows an operation until it ends. The first signal cancels it, the
/// second stops watching, even if the agent has not answered the first.
pub(crate) async fn follow<S: Shown>(
    client: &Client,
    operation: &Operation,
    signals: &mut Signals,
    display: &mut S,
) -> Result<Followed<S::State>, Problem> {
    let path = &operation.path();
    let mut lines = client.lines(&format!("{path}/progress")).await?;
    let mut asked = false;
    let mut cancelling = std::pin::pin!(None);
    loop {
        tokio::select! {
            line = lines.next::<S::State>() => match line? {
                Some(state) => {
                    display.show(&state);
                    if S::is_over(&state) {
                        return Ok(Followed::Ended(Box::new(state)));
                    }
                }
                None => return Err(Problem::Refused(S::LOST.to_owned())),
            },
            () = signals.next() => {
                if asked {
                    // It is to be heard also if the second press came at once.
                    let asking = cancelling.is_some();
                    let answered = tokio::time::timeout(ASK_MAX, answer(cancelling.as_mut()));
                    return Ok(Followed::Left { heard: !asking || answered.await.is_ok() });
                }
                asked = true;
                display.say(S::CANCELLING);
                cancelling.set(Some(client.cancel(path)));
            }
            answer = answer(cancelling.as_mut()) => {
                cancelling.set(None);
                match answer {
                    Ok(()) => {}
                    // Past the point of no return; the VM arrives.
                    Err(Problem::Refused(why)) => display.say(&format!("Not cancelled: {why}")),
                    Err(problem) => return Err(problem),
                }
            }
        }
    }
}

/// What comes of a request, if there is one.
async fn answer<T>(request: Pin<&mut Option<impl Future<Output = T>>>) -> T {
    match request.as_pin_mut() {
        Some(request) => request.await,
        None => std::future::pending().await,
    }
}
