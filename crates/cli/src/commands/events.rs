//! `events`: what happens at an agent, as it happens.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;

use crate::client::{Client, EventStream};
use crate::output::event;
use crate::problem::Problem;

/// How long to wait before an agent that was lost is asked again: twice as long each time.
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
    // The agent begins with a place to go on from, so nothing is missed unnoticed from here
    // on, even if the connection is lost before anything happens.
    let mut last = events.next().await?.and_then(|sent| sent.id);
    eprintln!("droveway: following what happens from now on; Ctrl-C ends that");
    loop {
        match show(&mut events, args.json, &mut last).await {
            End::NobodyReads => return Ok(ExitCode::SUCCESS),
            End::Lost(None) => eprintln!("droveway: the agent has ended; waiting for it"),
            End::Lost(Some(problem)) => eprintln!("droveway: {problem}; trying again"),
        }
        events = again(client, last.as_deref()).await?;
    }
}

enum End {
    /// What prints was closed, as by `head`.
    NobodyReads,
    /// The connection is gone, and why if that is known.
    Lost(Option<Problem>),
}

/// Shows events for as long as they come, and notes in `last` where it is.
async fn show(events: &mut EventStream, json: bool, last: &mut Option<String>) -> End {
    loop {
        let sent = match events.next().await {
            Ok(Some(sent)) => sent,
            Ok(None) => return End::Lost(None),
            Err(problem) => return End::Lost(Some(problem)),
        };
        if let Some(data) = sent.data {
            let text = if json { data } else { event::line(&data) };
            if writeln!(io::stdout(), "{text}").is_err() {
                return End::NobodyReads;
            }
        }
        if sent.id.is_some() {
            *last = sent.id;
        }
    }
}

/// Waits for the agent, and goes on after the event `last`.
async fn again(client: &Client, last: Option<&str>) -> Result<EventStream, Problem> {
    let mut pause = PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        match client.events(last).await {
            Err(Problem::Lost { .. } | Problem::NoAgent(_) | Problem::NotNow(_)) => {
                pause = (pause * 2).min(PAUSE_MAX);
            }
            answered => return answered,
        }
    }
}
