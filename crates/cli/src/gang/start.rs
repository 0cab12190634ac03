//! Starting a gang, and watching it until it has ended.

use std::process::ExitCode;

use api::{BitRate, GangOutcome, GangReport, GangRequest, GangStarted};
use clap::Args as ClapArgs;
use client::{Client, GANGS, Operation, Problem};
use hyper::Method;
use report::gang::{summary, without_report};

use super::plan;
use crate::output::{eprint_line, print, print_json, print_line};
use crate::watch::gang::Display;
use crate::watch::{Followed, Shown, Signals, begin, follow, leave, leave_unanswered, report};

#[derive(Debug, ClapArgs)]
pub(crate) struct StartArgs {
    /// The most that all migrations send together, in bits per second: divided among them by
    /// what each can use
    #[arg(long, value_name = "RATE")]
    pub(crate) limit_total: Option<BitRate>,
    /// How many VMs leave a host, and arrive at one, at a time [default: 2]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(api::PARALLEL_MAX)))]
    pub(crate) parallel: Option<u16>,
    /// Cancel the gang at the first VM that fails: those that have not moved yet stay
    #[arg(long)]
    pub(crate) atomic: bool,
    /// Only print where each VM goes, and what is expected to cross the network
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print the report (or the plan, or the list) as JSON on standard output,
    /// and nothing else there
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn start(
    client: &Client,
    request: &GangRequest,
    args: &StartArgs,
) -> Result<ExitCode, Problem> {
    let asking = client.request(Method::POST, GANGS, Some(request));
    if !request.dry_run {
        return begin_and_watch(client, asking, args.json).await;
    }
    // Nothing starts, so a signal simply ends the command.
    let planned: GangStarted = asking.await?;
    if args.json {
        print_json(&planned.plan)?;
    } else {
        print(format_args!("{}", plan::plan(&planned.plan)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the answer to a request that starts a gang, and watches the gang.
pub(crate) async fn begin_and_watch(
    client: &Client,
    asking: impl Future<Output = Result<GangStarted, Problem>>,
    json: bool,
) -> Result<ExitCode, Problem> {
    // Handled from now on, so that no signal before the first line of progress ends the
    // command and leaves the gang running unwatched.
    let mut signals = Signals::new()?;
    match begin(asking, &mut signals).await? {
        Some(started) => watch(client, &started, &mut signals, json).await,
        None => Ok(leave_unanswered("droveway gang")),
    }
}

async fn watch(
    client: &Client,
    started: &GangStarted,
    signals: &mut Signals,
    json: bool,
) -> Result<ExitCode, Problem> {
    let id = started.id.as_deref().unwrap_or_default();
    let operation = Operation::Gang(id.to_owned());
    let mut display = Display::new();
    for line in plan::beginning(id, &started.plan) {
        display.say(&line);
    }
    let followed = follow(client, &operation, signals, &mut display).await;
    display.clear();
    let last = match followed? {
        Followed::Ended(last) => last,
        Followed::Left { said } => return Ok(leave(&operation, said)),
    };
    let report: Result<GangReport, Problem> = report(client, &operation, signals).await;
    if let Err(problem) = report.and_then(|report| tell(&report, json)) {
        // Which VMs have moved is known anyway.
        eprint_line(format_args!("droveway: {}", without_report(&last)));
        eprint_line(format_args!("droveway: no report: {problem}"));
    }
    let is_done = last.outcome == Some(GangOutcome::Done);
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell(report: &GangReport, json: bool) -> Result<(), Problem> {
    if !json {
        return print_line(format_args!("{}", summary(report)));
    }
    print_json(report)?;
    if report.outcome != Some(GangOutcome::Done) {
        eprint_line(format_args!("droveway: {}", summary(report)));
    }
    Ok(())
}
