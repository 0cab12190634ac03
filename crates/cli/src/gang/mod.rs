//! `gang` and `evacuate`: many VMs as one operation.

mod args;
mod file;
mod options;
mod plan;

use std::process::ExitCode;

use api::{Evacuation, GangOutcome, GangProgress, GangReport, GangRequest, GangStarted};
use hyper::Method;

use args::RunArgs;
pub(crate) use args::{EvacuateArgs, GangArgs};
use options::Options;

use crate::client::{Client, NOTHING, segment};

use crate::operation::Operation;
use crate::output::{aligned, amount, print_json};
use crate::problem::Problem;
use crate::report::gang::sentences;
use crate::watch::gang::Display;
use crate::watch::{Followed, Shown, Signals, follow, leave};

const GANGS: &str = "/v1/gangs";

pub(crate) async fn gang(client: &Client, args: GangArgs) -> Result<ExitCode, Problem> {
    let GangArgs { moves, file, resume, how, run } = args;
    if let Some(id) = resume {
        let path = format!("{GANGS}/{}/resume", segment(&id));
        // Heard from now on: see `perform`.
        let mut signals = Signals::new()?;
        let started: GangStarted = client.ask(Method::POST, &path, NOTHING).await?;
        return watch(client, &started, &mut signals, run.json).await;
    }
    let (moves, from_file) = match file {
        Some(path) => {
            let plan = file::read(&path)?;
            (plan.moves, plan.settings)
        }
        None if moves.is_empty() && run.dry_run => {
            let text = "there is nothing to plan: name VMs as VM=HOST, or a plan file with --file";
            return Err(Problem::Typed(text.to_owned()));
        }
        None if moves.is_empty() => return list(client, run.json).await,
        None => (moves, file::Settings::default()),
    };
    let request = GangRequest {
        moves,
        evacuate: None,
        options: Options::from(how).or(from_file.options).into(),
        parallel: run.parallel.or(from_file.parallel).unwrap_or(args::PARALLEL_DEFAULT),
        atomic: run.atomic || from_file.atomic,
        dry_run: run.dry_run,
    };
    perform(client, &request, &run).await
}

pub(crate) async fn evacuate(client: &Client, args: EvacuateArgs) -> Result<ExitCode, Problem> {
    let EvacuateArgs { host, to, how, run } = args;
    let request = GangRequest {
        moves: Vec::new(),
        evacuate: Some(Evacuation { host, to }),
        options: Options::from(how).into(),
        parallel: run.parallel.unwrap_or(args::PARALLEL_DEFAULT),
        atomic: run.atomic,
        dry_run: run.dry_run,
    };
    perform(client, &request, &run).await
}

async fn perform(
    client: &Client,
    request: &GangRequest,
    run: &RunArgs,
) -> Result<ExitCode, Problem> {
    // Heard from now on, so that no signal between here and the first line of
    // progress ends the command and leaves the gang running unseen.
    let mut signals = Signals::new()?;
    let started: GangStarted = client.ask(Method::POST, GANGS, Some(request)).await?;
    if started.id.is_some() {
        return watch(client, &started, &mut signals, run.json).await;
    }
    if run.json {
        print_json(&started.plan)?;
    } else {
        print!("{}", plan::plan(&started.plan));
    }
    Ok(ExitCode::SUCCESS)
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

async fn list(client: &Client, json: bool) -> Result<ExitCode, Problem> {
    let gangs: Vec<GangProgress> = client.get(GANGS).await?;
    if json {
        print_json(&gangs)?;
    } else {
        print!("{}", table(&gangs));
    }
    Ok(ExitCode::SUCCESS)
}

fn table(gangs: &[GangProgress]) -> String {
    if gangs.is_empty() {
        return "No gangs. Move several VMs with `droveway gang VM=HOST ...` or `droveway evacuate \
                HOST`.\n"
            .to_owned();
    }
    let mut rows = vec![["GANG", "STATE", "MOVED", "FAILED", "TIME"].map(str::to_owned)];
    rows.extend(gangs.iter().map(|gang| {
        let state = match gang.outcome {
            None => "runs",
            Some(GangOutcome::Done) => "done",
            Some(GangOutcome::Failed) => "failed",
            Some(GangOutcome::Cancelled) => "cancelled",
            Some(GangOutcome::Interrupted) => "interrupted",
        };
        [
            gang.id.clone(),
            state.to_owned(),
            format!("{} of {}", gang.totals.done, gang.moves.len()),
            gang.totals.failed.to_string(),
            amount::seconds(gang.elapsed_s),
        ]
    }));
    aligned(&rows)
}
