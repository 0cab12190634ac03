//! The requests before and after an operation is watched. An agent may take a minute to plan a
//! gang, or never answer, so a signal ends the wait.

use std::pin::pin;
use std::process::ExitCode;

use serde::de::DeserializeOwned;

use super::follow::INTERRUPTED;
use super::signals::Signals;
use crate::client::Client;
use crate::operation::Operation;
use crate::output::eprint_line;
use crate::problem::Problem;

/// Waits until an operation begins. The first signal is kept, to cancel the operation once its
/// id is known. At the second the user leaves, and the answer is none.
pub(crate) async fn begin<T>(
    asking: impl Future<Output = Result<T, Problem>>,
    signals: &mut Signals,
) -> Result<Option<T>, Problem> {
    let mut asking = pin!(asking);
    let mut is_told = false;
    loop {
        tokio::select! {
            () = signals.next() => {
                if is_told {
                    return Ok(None);
                }
                is_told = true;
                eprint_line(format_args!(
                    "It is cancelled as soon as the agent has answered. Ctrl-C again: don't wait \
                     for it."
                ));
            }
            answer = asking.as_mut() => {
                if is_told {
                    signals.keep();
                }
                return answer.map(Some);
            }
        }
    }
}

/// Tells a user who leaves before the agent has answered; `shows` is the command that shows
/// what begins.
pub(crate) fn leave_unanswered(shows: &str) -> ExitCode {
    eprint_line(format_args!(
        "droveway: not waiting any longer. The agent has not answered; it may begin all the same: \
         `{shows}` says whether it has"
    ));
    ExitCode::from(INTERRUPTED)
}

/// The report of an operation that has ended.
pub(crate) async fn report<T: DeserializeOwned>(
    client: &Client,
    operation: &Operation,
    signals: &mut Signals,
) -> Result<T, Problem> {
    let path = format!("{}/report", operation.path());
    tokio::select! {
        report = client.get(&path) => report,
        () = signals.next() => Err(Problem::Refused("it was not waited for".to_owned())),
    }
}
