//! `dashboard`: pages for a browser on this machine.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use identity::{Files, Person, Role, Subject};

use crate::client::{Client, Route};
use crate::dashboard;
use crate::problem::Problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct DashboardArgs {
    /// Where to serve the pages: an address of loopback. From another machine use
    /// `ssh -L`
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:7880",
          value_parser = parse_listen)]
    listen: SocketAddr,
    /// Also ask this agent, as --api names one, for migrations that begin at its host
    /// [may be given several times]
    #[arg(long, value_name = "SOCKET|https://HOST:PORT")]
    agent: Vec<PathBuf>,
    /// Show all, and change nothing
    #[arg(long)]
    read_only: bool,
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
    let DashboardArgs { listen, agent, read_only } = args;
    let apis = std::iter::once(api).chain(agent.into_iter().map(Some));
    let routes: Vec<Route> = apis.map(|api| Route::new(api, tls)).collect::<Result<_, _>>()?;
    let only_observes = match (routes.iter().any(Route::is_remote), tls) {
        (true, Some(tls)) => observes(tls)?,
        _ => false,
    };
    let clients = routes.into_iter().map(Client::new).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Problem::Local { what: "starting".to_owned(), source })?;
    runtime.block_on(dashboard::serve(listen, clients, read_only || only_observes))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether the certificate permits to look, and no more.
fn observes(tls: &Path) -> Result<bool, Problem> {
    let person = Person::load(&Files::within(tls))?;
    Ok(matches!(person.subject(), Subject::Client { role: Role::Observe, .. }))
}
