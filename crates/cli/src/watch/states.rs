//! The successive states of an operation, as its agent reports them.

use std::time::Duration;

use client::{Client, Lines, Problem};
use serde::de::DeserializeOwned;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// The interval of queries to an agent that sends no lines.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The states, one after the other.
pub(super) struct States<'c> {
    client: &'c Client,
    path: &'c str,
    source: Source,
}

enum Source {
    /// Nothing was requested yet.
    Unopened,
    /// Lines that the agent sends.
    Lines(Lines),
    /// Queries at intervals. The agent has as many readers of lines as it serves, or it gave this
    /// reader up, which was suspended.
    Asked(Interval),
}

impl Source {
    fn asked() -> Self {
        let mut every = interval(ASK_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self::Asked(every)
    }
}

/// The first state of an operation that `is_over`.
pub(crate) async fn last<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    is_over: impl Fn(&T) -> bool,
) -> Result<T, Problem> {
    let mut states = States::new(client, path);
    loop {
        match states.next::<T>().await? {
            Some(state) if is_over(&state) => return Ok(state),
            Some(_) => {}
            None => {
                let text = "the agent has ended, and how it ends is not known here: `droveway \
                            list --migrations` shows it when the agent runs again";
                return Err(Problem::Refused(text.to_owned()));
            }
        }
    }
}

impl<'c> States<'c> {
    /// The states of the operation at this path of the API.
    pub(super) fn new(client: &'c Client, path: &'c str) -> Self {
        Self { client, path, source: Source::Unopened }
    }

    /// The next state; none if the agent has ended, or doesn't know the operation any more. The
    /// future can be dropped at any time.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Problem> {
        loop {
            self.source = match &mut self.source {
                Source::Unopened => {
                    match self.client.lines(&format!("{}/progress", self.path)).await {
                        Ok(lines) => Source::Lines(lines),
                        Err(Problem::NotNow(_)) => Source::asked(),
                        Err(problem) => return Err(problem),
                    }
                }
                Source::Lines(lines) => match lines.next().await? {
                    Some(state) => return Ok(Some(state)),
                    None => Source::asked(),
                },
                Source::Asked(every) => {
                    every.tick().await;
                    match self.client.get(self.path).await {
                        Ok(state) => return Ok(Some(state)),
                        Err(Problem::NotNow(_)) => continue,
                        Err(
                            Problem::NoAgent(_)
                            | Problem::Unreached { .. }
                            | Problem::Lost { .. }
                            | Problem::Refused(_),
                        ) => return Ok(None),
                        Err(problem) => return Err(problem),
                    }
                }
            };
        }
    }
}
