//! The `droveway` command: it runs a host's agent, and sends requests to agents.

#![forbid(unsafe_code)]
// These macros panic if their output has no reader any more. The functions of `output` don't.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod commands;
mod gang;
mod init;
mod libvirt;
mod options;
mod output;
mod runtime;
mod top;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use client::{Client, Problem, Route};

use crate::commands::{Args, Command, agent, ca};
use crate::output::eprint_line;
use crate::runtime::runtime;

fn main() -> ExitCode {
    match perform(Args::parse()) {
        Ok(code) => code,
        Err(problem) => {
            eprint_line(format_args!("droveway: {problem}"));
            ExitCode::FAILURE
        }
    }
}

fn perform(Args { api, tls, command }: Args) -> Result<ExitCode, Problem> {
    match command {
        // The agent makes its own runtime after its configuration is checked.
        Command::Agent(args) => agent::run(args, api, tls),
        Command::Init(args) => commands::init::run(args),
        Command::Ca(args) => ca::run(&args),
        Command::Dashboard(args) => commands::dashboard::run(args, api, tls.as_deref()),
        Command::Top(args) => commands::top::run(args, api, tls.as_deref()),
        Command::Libvirt(args) => commands::libvirt::run(&args),
        Command::Xen(args) => commands::xen::run(args),
        Command::XenSend(args) => commands::xen_send::run(args, api),
        Command::Completions(args) => commands::completions::run(&args),
        Command::Man(args) => commands::completions::man(&args),
        Command::Request(request) => {
            let client = Client::new(Route::new(api, tls.as_deref())?);
            runtime()?.block_on(request.run(&client))
        }
    }
}
