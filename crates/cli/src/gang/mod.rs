//! `gang` and `evacuate`: many VMs as one operation.

mod args;
mod file;
mod options;
mod show;
mod summary;

use std::process::ExitCode;

use api::{Evacuation, GangOutcome, GangProgress, GangReport, GangRequest, GangStarted};
use hyper::Method;

use args::RunArgs;
pub(crate) use args::{EvacuateArgs, GangArgs};
use options::Options;
use show::Display;

use crate::args::ReportArgs;
use crate::client::{Client, NOTHING, segment};
use crate::follow::{Followed, INTERRUPTED, Shown, Signals, follow};
use crate::output::print_json;
use crate::problem::Problem;

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
        print!("{}", summary::plan(&started.plan));
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
    let path = format!("{GANGS}/{}", segment(id));
    let mut display = Display::new();
    for line in summary::beginning(id, &started.plan) {
        display.say(&line);
    }
    let followed = follow(client, &path, signals, &mut display).await;
    display.clear();
    match followed? {
        Followed::Ended(_) => {}
        Followed::Left { heard } => {
            let said = if heard {
                format!("Gang {id} is being cancelled; `droveway report {id}` says how it ends")
            } else {
                format!(
                    "The agent has not answered: gang {id} may go on. `droveway cancel {id}` asks \
                     again"
                )
            };
            eprintln!("droveway: no longer watching. {said}");
            return Ok(ExitCode::from(INTERRUPTED));
        }
    }
    let report: GangReport = client.get(&format!("{path}/report")).await?;
    tell(&report, json)
}

fn tell(report: &GangReport, json: bool) -> Result<ExitCode, Problem> {
    let done = report.outcome == Some(GangOutcome::Done);
    if json {
        print_json(report)?;
        if !done {
            eprintln!("droveway: {}", summary::sentences(report));
        }
    } else {
        println!("{}", summary::sentences(report));
    }
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn list(client: &Client, json: bool) -> Result<ExitCode, Problem> {
    let gangs: Vec<GangProgress> = client.get(GANGS).await?;
    if json {
        print_json(&gangs)?;
    } else {
        print!("{}", summary::table(&gangs));
    }
    Ok(ExitCode::SUCCESS)
}

/// `droveway report` of a gang.
pub(crate) async fn report(client: &Client, args: &ReportArgs) -> Result<ExitCode, Problem> {
    if args.html.is_some() {
        return Err(Problem::Typed(
            "a gang has no page of its own: each of its migrations has, at the host that its VM \
             left"
                .to_owned(),
        ));
    }
    let report: GangReport = client.get(&format!("{GANGS}/{}/report", segment(&args.id))).await?;
    if args.json {
        print_json(&report)?;
    } else {
        print!("{}", summary::text(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether it names a gang: migrations have hex digits alone.
pub(crate) fn is_id(id: &str) -> bool {
    let digits = id.strip_prefix('g').unwrap_or_default();
    digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}
