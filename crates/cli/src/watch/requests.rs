//! The requests before and after an operation is watched, and those that can't be taken back. An
//! agent may take a minute to plan a gang, or never answer, so a signal ends the wait.

use std::pin::pin;
use std::process::ExitCode;

use client::{Client, Operation, Problem};
use serde::de::DeserializeOwned;

use super::follow::INTERRUPTED;
use super::signals::Signals;
use crate::output::eprint_line;

/// The message at the first signal while an operation starts.
const CANCELLED_SOON: &str =
    "It is cancelled as soon as the agent has answered. Ctrl-C again: don't wait for it.";

/// Waits until an operation starts. The first signal is kept, to cancel the operation once its
/// id is known. At the second the user leaves, and the answer is none.
pub(crate) async fn begin<T>(
    asking: impl Future<Output = Result<T, Problem>>,
    signals: &mut Signals,
) -> Result<Option<T>, Problem> {
    let Some((begun, is_told)) = answered(asking, signals, CANCELLED_SOON).await? else {
        return Ok(None);
    };
    if is_told {
        signals.keep();
    }
    Ok(Some(begun))
}

/// Waits for the answer to a request that the agent carries out whatever becomes of this command.
/// The first signal shows `goes_on`. At the second the user leaves, and the answer is none. So it
/// is at once when the command is `terminated`: `timeout` sends no second signal.
pub(crate) async fn wait<T>(
    asking: impl Future<Output = Result<T, Problem>>,
    signals: &mut Signals,
    terminated: impl Future<Output = ()>,
    goes_on: &str,
) -> Result<Option<T>, Problem> {
    tokio::select! {
        answer = answered(asking, signals, goes_on) => Ok(answer?.map(|(answer, _)| answer)),
        () = terminated => Ok(None),
    }
}

/// The answer, and whether there was a signal, which shows `text`; none after a second signal.
async fn answered<T>(
    asking: impl Future<Output = Result<T, Problem>>,
    signals: &mut Signals,
    text: &str,
) -> Result<Option<(T, bool)>, Problem> {
    let mut asking = pin!(asking);
    let mut is_told = false;
    loop {
        tokio::select! {
            () = signals.next() => {
                if is_told {
                    return Ok(None);
                }
                is_told = true;
                eprint_line(format_args!("{text}"));
            }
            answer = asking.as_mut() => return answer.map(|answer| Some((answer, is_told))),
        }
    }
}

/// Tells a user who leaves before the agent has answered; `shows` is the command that shows
/// what starts.
pub(crate) fn leave_unanswered(shows: &str) -> ExitCode {
    eprint_line(format_args!(
        "droveway: not waiting any longer. The agent has not answered; it may start anyway: \
         `{shows}` shows whether it has"
    ));
    ExitCode::from(INTERRUPTED)
}

/// Tells a user who leaves while a VM is being stopped.
pub(crate) fn leave_stopping(name: &str) -> ExitCode {
    eprint_line(format_args!(
        "droveway: not waiting any longer. {name} is stopped anyway: `droveway list` shows whether \
         it is still there"
    ));
    ExitCode::from(INTERRUPTED)
}

/// Tells a user who leaves while VMs get another QEMU.
pub(crate) fn leave_upgrading() -> ExitCode {
    eprint_line(format_args!(
        "droveway: no longer watching. VMs whose move has started may still get another QEMU: \
         `droveway list --migrations` shows how the moves end"
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
