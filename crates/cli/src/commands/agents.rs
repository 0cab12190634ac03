//! The agents that the dashboard and `top` query.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use client::{Client, Problem, Route};
use identity::{Files, Person, Role, Subject};

#[derive(Debug, ClapArgs)]
pub(crate) struct AgentsArgs {
    /// Also show migrations that start at this agent's host; its address is as for --api;
    /// may be repeated
    #[arg(long, value_name = "SOCKET|https://HOST:PORT")]
    agent: Vec<PathBuf>,
    /// Only show, and offer nothing that changes something
    #[arg(long)]
    read_only: bool,
}

/// The agents, connected to as typed.
pub(crate) struct Agents {
    pub(crate) clients: Vec<Client>,
    /// Whether they may only be queried, not given orders.
    pub(crate) read_only: bool,
}

impl AgentsArgs {
    pub(crate) fn reach(self, api: Option<PathBuf>, tls: Option<&Path>) -> Result<Agents, Problem> {
        let apis = std::iter::once(api).chain(self.agent.into_iter().map(Some));
        let routes: Vec<Route> = apis.map(|api| Route::new(api, tls)).collect::<Result<_, _>>()?;
        let only_observes = match (routes.iter().any(Route::is_remote), tls) {
            (true, Some(tls)) => observes(tls)?,
            _ => false,
        };
        let clients = routes.into_iter().map(Client::new).collect();
        Ok(Agents { clients, read_only: self.read_only || only_observes })
    }
}

/// Whether the certificate permits only to observe.
fn observes(tls: &Path) -> Result<bool, Problem> {
    let person = Person::load(&Files::within(tls))?;
    Ok(matches!(person.subject(), Subject::Client { role: Role::Observe, .. }))
}
