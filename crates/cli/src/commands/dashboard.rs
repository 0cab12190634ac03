//! `dashboard`: pages for a browser on this machine.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::Problem;

use super::agents::AgentsArgs;
use super::runtime;
use crate::dashboard;

#[derive(Debug, ClapArgs)]
pub(crate) struct DashboardArgs {
    /// Where to serve the pages: an address of loopback. From another machine use
    /// `ssh -L`
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:7880",
          value_parser = parse_listen)]
    listen: SocketAddr,
    #[command(flatten)]
    agents: AgentsArgs,
}

fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr =
        text.parse().map_err(|_| "write IP:PORT, such as 127.0.0.1:7880".to_owned())?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err("the pages are for this machine alone: 127.0.0.1 or [::1]".to_owned())
    }
}

pub(crate) fn run(
    args: DashboardArgs,
    api: Option<PathBuf>,
    tls: Option<&Path>,
) -> Result<ExitCode, Problem> {
    let DashboardArgs { listen, agents } = args;
    let agents = agents.reach(api, tls)?;
    runtime()?.block_on(dashboard::serve(listen, agents))?;
    Ok(ExitCode::SUCCESS)
}
