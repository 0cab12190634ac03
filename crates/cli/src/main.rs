//! The `droveway` command: the agent of a host, and what people say to it.

#![forbid(unsafe_code)]

mod args;
mod ca;
mod client;
mod commands;
mod doctor;
mod gang;
mod operation;
mod options;
mod output;
mod predict;
mod problem;
mod report;
mod resolve;
mod road;
mod vms;
mod watch;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};
use crate::client::Client;
use crate::problem::Problem;
use crate::road::Road;

fn main() -> ExitCode {
    let args = Args::parse();
    match perform(args) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("droveway: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn perform(args: Args) -> Result<ExitCode, Problem> {
    let Args { api, tls, command } = args;
    // The agent has a runtime of its own, made once its configuration holds.
    if let Command::Agent(command) = command {
        agent::run(&command.into_flags(api, tls))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Nor does this ask any agent.
    if let Command::Ca(command) = command {
        ca::run(&command)?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Problem::Local { what: "starting".to_owned(), source })?;
    let client = Client::new(Road::new(api, tls.as_deref())?);
    runtime.block_on(async {
        match command {
            Command::Agent(_) | Command::Ca(_) => unreachable!("handled above"),
            Command::Run(command) => vms::run(&client, command).await,
            Command::List(command) => vms::list(&client, &command).await,
            Command::Show(command) => vms::show(&client, &command).await,
            Command::Stop(command) => vms::stop(&client, &command).await,
            Command::Attach(command) => vms::attach(&client, command).await,
            Command::Migrate(command) => commands::migrate::run(&client, command).await,
            Command::Gang(command) => gang::gang(&client, command).await,
            Command::Evacuate(command) => gang::evacuate(&client, command).await,
            Command::Predict(command) => predict::predict(&client, command).await,
            Command::Set(command) => commands::set::run(&client, command).await,
            Command::Cancel(command) => commands::cancel::run(&client, &command).await,
            Command::Resolve(command) => resolve::resolve(&client, &command).await,
            Command::Doctor(command) => doctor::examine(&client, &command).await,
            Command::Report(command) => commands::report::run(&client, &command).await,
        }
    })
}
