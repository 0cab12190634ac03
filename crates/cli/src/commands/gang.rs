//! `gang`: move several VMs as one operation, or list such operations.

use std::path::PathBuf;
use std::process::ExitCode;

use api::{GangOutcome, GangProgress, GangRequest, PARALLEL_DEFAULT, RequestedMove};
use clap::{ArgGroup, Args as ClapArgs};
use client::{Client, GANGS, NOTHING, Operation, Problem};
use hyper::Method;
use report::{aligned, amount};

use crate::gang::plan_file::{self, Plan};
use crate::gang::start::{StartArgs, begin_and_watch, start};
use crate::options::MoveOptions;
use crate::output::{print, print_json};

#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("what").args(["moves", "file", "resume"])))]
pub(crate) struct GangArgs {
    /// VMs, and the hosts to move them to; where two hosts have a VM of that name,
    /// write HOST/VM=HOST. Without any, gangs are listed
    #[arg(value_name = "VM=HOST", value_parser = parse_move)]
    moves: Vec<RequestedMove>,
    /// A TOML file with the moves and any of these options; options typed here override it
    #[arg(long, value_name = "PLAN")]
    file: Option<PathBuf>,
    /// Resume a gang that has not moved all of its VMs
    #[arg(long, value_name = "ID", conflicts_with_all = new_gangs_options())]
    resume: Option<String>,
    #[command(flatten)]
    options: MoveOptions,
    #[command(flatten)]
    start: StartArgs,
}

/// The options that only a new gang has, and not one that is resumed.
fn new_gangs_options() -> Vec<clap::Id> {
    let of_moves = MoveOptions::augment_args(clap::Command::new("gang"));
    let of_gang = ["limit_total", "parallel", "atomic", "dry_run"].map(clap::Id::from);
    of_moves.get_arguments().map(|option| option.get_id().clone()).chain(of_gang).collect()
}

fn parse_move(text: &str) -> Result<RequestedMove, String> {
    let (vm, to) = text.split_once('=').unwrap_or_default();
    let (from, vm) = match vm.split_once('/') {
        Some((from, vm)) => (Some(from), vm),
        None => (None, vm),
    };
    if vm.is_empty() || to.is_empty() || from.is_some_and(str::is_empty) {
        return Err("write VM=HOST, such as web1=host-b, or host-a/web1=host-b".to_owned());
    }
    Ok(RequestedMove { vm: vm.to_owned(), from: from.map(str::to_owned), to: to.to_owned() })
}

pub(crate) async fn run(client: &Client, args: GangArgs) -> Result<ExitCode, Problem> {
    let GangArgs { moves, file, resume, mut options, start: args } = args;
    if let Some(id) = resume {
        let path = format!("{}/resume", Operation::Gang(id).path());
        let asking = client.request(Method::POST, &path, NOTHING);
        return begin_and_watch(client, asking, args.json).await;
    }
    let plan = match file {
        Some(path) => plan_file::read(&path)?,
        None if moves.is_empty() && args.dry_run => {
            let text = "there is nothing to plan: name VMs as VM=HOST, or a plan file with --file";
            return Err(Problem::Typed(text.to_owned()));
        }
        None if moves.is_empty() => return list(client, args.json).await,
        None => Plan { moves, ..Plan::default() },
    };
    options.limit_total = args.limit_total;
    let request = GangRequest {
        moves: plan.moves,
        evacuate: None,
        options: options.or(plan.options).check()?.into(),
        parallel: args.parallel.or(plan.parallel).unwrap_or(PARALLEL_DEFAULT),
        atomic: args.atomic || plan.atomic,
        dry_run: args.dry_run,
    };
    start(client, &request, &args).await
}

async fn list(client: &Client, json: bool) -> Result<ExitCode, Problem> {
    let gangs: Vec<GangProgress> = client.get(GANGS).await?;
    if json {
        print_json(&gangs)?;
    } else {
        print(format_args!("{}", table(&gangs)))?;
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
