//! Starting a gang, and watching it until it has ended.

use std::process::ExitCode;

use api::{GangOutcome, GangReport, GangRequest, GangStarted};
use clap::Args as ClapArgs;
use hyper::Method;

use super::plan;
use crate::client::Client;
use crate::operation::Operation;
use crate::output::print_json;
use crate::problem::Problem;
use crate::report::gang::sentences;
use crate::watch::gang::Display;
use crate::watch::{Followed, Shown, Signals, follow, leave};

/// Where the API has gangs.
pub(crate) const GANGS: &str = "/v1/gangs";
/// The API's own.
pub(crate) const PARALLEL_DEFAULT: u16 = 2;

#[derive(Debug, ClapArgs)]
pub(crate) struct StartArgs {
    /// How many VMs leave a host, and arrive at one, at a time [default: 2]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(api::PARALLEL_MAX)))]
    pub(crate) parallel: Option<u16>,
    /// The first VM that fails ends the gang: those that have not moved yet stay
    #[arg(long)]
    pub(crate) atomic: bool,
    /// Only say where each VM goes, and what is expected to cross the network
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
    // Heard from now on, so that no signal between here and the first line of
    // progress ends the command and leaves the gang running unseen.
    let mut signals = Signals::new()?;
    let started: GangStarted = client.ask(Method::POST, GANGS, Some(request)).await?;
    if started.id.is_some() {
        return watch(client, &started, &mut signals, args.json).await;
    }
    if args.json {
        print_json(&started.plan)?;
    } else {
        print!("{}", plan::plan(&started.plan));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn watch(
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
    match followed? {
        Followed::Ended(_) => {}
        Followed::Left { heard } => return Ok(leave(&operation, heard)),
    }
    let report: GangReport = client.get(&format!("{}/report", operation.path())).await?;
    tell(&report, json)
}

fn tell(report: &GangReport, json: bool) -> Result<ExitCode, Problem> {
    let done = report.outcome == Some(GangOutcome::Done);
    if json {
        print_json(report)?;
        if !done {
            eprintln!("droveway: {}", sentences(report));
        }
    } else {
        println!("{}", sentences(report));
    }
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
