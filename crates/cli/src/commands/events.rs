//! `events`: follow an agent's events as they happen.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use client::{Client, EventStream, Problem};
use report::event;

use crate::output::{eprint_line, legible};

/// The pause before the first attempt to reconnect; it doubles each time.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(8);

#[derive(Debug, ClapArgs)]
pub(crate) struct EventsArgs {
    /// Print each event as a line of JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: &EventsArgs) -> Result<ExitCode, Problem> {
    let mut events = client.events(None).await?;
    // The agent first sends an id to resume from, so from here on nothing is missed unnoticed,
    // even if the connection is lost before the first event.
    let mut last = events.next().await?.and_then(|sent| sent.id);
    eprint_line(format_args!("droveway: following new events; Ctrl-C ends that"));
    loop {
        match show(&mut events, args.json, &mut last).await {
            End::NobodyReads => return Ok(ExitCode::SUCCESS),
            End::Lost(None) => {
                eprint_line(format_args!("droveway: the agent has ended; waiting for it"));
            }
            End::Lost(Some(problem)) => {
                eprint_line(format_args!("droveway: {problem}; trying again"));
            }
        }
        events = again(client, last.as_deref()).await?;
    }
}

enum End {
    /// Standard output was closed, as by `head`.
    NobodyReads,
    /// The connection was lost, with the reason if it is known.
    Lost(Option<Problem>),
}

/// Shows events until the stream ends, and keeps the last id in `last`.
async fn show(events: &mut EventStream, json: bool, last: &mut Option<String>) -> End {
    loop {
        let sent = match events.next().await {
            Ok(Some(sent)) => sent,
            Ok(None) => return End::Lost(None),
            Err(problem) => return End::Lost(Some(problem)),
        };
        if let Some(data) = sent.data {
            let text = if json { data } else { legible(&event::line(&data)).into_owned() };
            if writeln!(io::stdout(), "{text}").is_err() {
                return End::NobodyReads;
            }
        }
        if sent.id.is_some() {
            *last = sent.id;
        }
    }
}

/// Waits for the agent, and resumes after the event `last`.
async fn again(client: &Client, last: Option<&str>) -> Result<EventStream, Problem> {
    let mut pause = PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        match client.events(last).await {
            Err(
                Problem::Lost { .. }
                | Problem::NoAgent(_)
                | Problem::Unreached { .. }
                | Problem::NotNow(_),
            ) => {
                pause = (pause * 2).min(PAUSE_MAX);
            }
            answered => return answered,
        }
    }
}
