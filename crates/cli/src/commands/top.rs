//! `top`: hosts, VMs and migrations in a terminal, as they change.

use std::io::{IsTerminal, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::Problem;

use super::agents::AgentsArgs;
use crate::runtime::runtime;
use crate::top;

#[derive(Debug, ClapArgs)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    agents: AgentsArgs,
    /// Print it once, as text, which is also done if the output is no terminal
    #[arg(long)]
    once: bool,
}

pub(crate) fn run(
    args: TopArgs,
    api: Option<PathBuf>,
    tls: Option<&Path>,
) -> Result<ExitCode, Problem> {
    let agents = args.agents.reach(api, tls)?;
    if args.once || !stdout().is_terminal() {
        runtime()?.block_on(top::once(agents))?;
    } else {
        runtime()?.block_on(top::watch(agents))?;
    }
    Ok(ExitCode::SUCCESS)
}
