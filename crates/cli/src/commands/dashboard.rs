//! `dashboard`: pages for a browser on this machine.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::Problem;
use dashboard::Pages;

use super::agents::{Agents, AgentsArgs};
use crate::output::{eprint_line, print_line};
use crate::runtime::runtime;

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
    let Agents { clients, read_only } = agents.reach(api, tls)?;
    runtime()?.block_on(async {
        let pages = Pages::open(listen, clients, read_only).await?;
        eprint_line(format_args!(
            "droveway: open this address in a browser on this machine. It works once; then another \
             one is printed. Ctrl-C ends the dashboard"
        ));
        pages.serve(announce).await
    })?;
    Ok(ExitCode::SUCCESS)
}

fn announce(address: &str) {
    // Standard output may be full, which does not end the pages.
    let _ = print_line(format_args!("{address}"));
}
