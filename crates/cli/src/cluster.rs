//! What agents say of hosts, migrations and gangs, kept up to date while somebody looks:
//! a browser at the dashboard's pages, or a terminal.

mod ended;
#[cfg(test)]
pub(crate) mod example;
mod known;
mod trace;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{GangReport, HostInfo, Report};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::client::{Client, segment};
use crate::gang::start::GANGS;
use crate::operation::Operation;
use crate::problem::Problem;
pub(crate) use ended::{Ended, EndedAs};
use known::Said;
pub(crate) use known::{HostState, Known, Running};
pub(crate) use trace::Point;

/// Between two looks at migrations.
const MOVES_EVERY: Duration = Duration::from_secs(1);
/// Between two looks at hosts, each of which has its agent ask its QEMUs.
const HOSTS_EVERY: Duration = Duration::from_secs(10);
/// How often hosts are looked at that somebody waits for.
const HOSTS_SOON: Duration = Duration::from_millis(20);
/// A browser that asks no more has been closed.
const LOOKS_FOR: Duration = Duration::from_secs(60);
/// What an answer may take. An agent waits for another one for 15 s.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// How long a page waits for a first answer.
const FIRST_MAX: Duration = Duration::from_secs(3);
/// Hosts that are asked at a time.
const HOSTS_AT_ONCE: usize = 8;

/// The agents, and what they said.
pub(crate) struct Cluster {
    agents: Vec<Agent>,
    known: Mutex<Known>,
    looked: Mutex<Instant>,
    wanted: Notify,
    /// Rounds that are through.
    rounds: watch::Sender<u64>,
}

/// An agent that is asked directly.
struct Agent {
    client: Arc<Client>,
    host: String,
}

impl Cluster {
    /// Asks each agent who it is.
    pub(crate) async fn meet(clients: Vec<Client>) -> Result<Self, Problem> {
        let mut known = Known::default();
        known.stale = true;
        let mut agents = Vec::new();
        for client in clients {
            let info: HostInfo = client.get("/v1/host").await?;
            let racks = info.peers.into_iter().map(|peer| (peer.name, peer.rack));
            for (name, rack) in racks.chain([(info.name.clone(), info.rack)]) {
                known.hosts.entry(name).or_default().rack = rack;
            }
            agents.push(Agent { client: Arc::new(client), host: info.name });
            known.said.push(Said::default());
        }
        Ok(Self {
            agents,
            known: Mutex::new(known),
            looked: Mutex::new(Instant::now()),
            wanted: Notify::new(),
            rounds: watch::channel(0).0,
        })
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody looks: from now on for a while all is kept up to date. Waits for a first
    /// answer.
    pub(crate) async fn look(&self) {
        let mut rounds = self.rounds.subscribe();
        let was_asleep = {
            let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *looked, Instant::now()).elapsed() > LOOKS_FOR
        };
        self.wanted.notify_waiters();
        if was_asleep || *rounds.borrow_and_update() == 0 {
            // Without an answer what is known is shown.
            let _ = timeout(FIRST_MAX, rounds.changed()).await;
        }
    }

    /// Waits until migrations were asked for once more.
    pub(crate) async fn next_round(&self) {
        // The sender is here.
        let _ = self.rounds.subscribe().changed().await;
    }

    /// Waits until each host has answered, or could not be asked.
    pub(crate) async fn wait_for_hosts(&self) {
        let all = async {
            while !self.known().hosts.values().all(HostState::was_asked) {
                sleep(HOSTS_SOON).await;
            }
        };
        // What is known is shown.
        let _ = timeout(ANSWER_MAX, all).await;
    }

    /// The agent that something is asked of which any can do.
    pub(crate) fn any(&self) -> Arc<Client> {
        Arc::clone(&self.agents[0].client)
    }

    /// The agent with this number, as in [`Running::agent`].
    pub(crate) fn agent(&self, number: usize) -> Option<Arc<Client>> {
        self.agents.get(number).map(|agent| Arc::clone(&agent.client))
    }

    /// That of a host, if it is asked directly.
    pub(crate) fn agent_of(&self, host: &str) -> Option<Arc<Client>> {
        let agent = self.agents.iter().find(|agent| agent.host == host)?;
        Some(Arc::clone(&agent.client))
    }

    /// Something was ordered: look at once.
    pub(crate) fn hurry(&self) {
        self.known().stale = true;
    }

    /// Keeps all up to date, for ever.
    pub(crate) async fn watch(self: Arc<Self>) {
        let hosts = tokio::spawn(Arc::clone(&self).watch_hosts());
        let _hosts = AbortOnDrop(hosts);
        loop {
            self.awaken().await;
            self.ask_for_moves().await;
            self.ask_for_reports().await;
            self.rounds.send_modify(|rounds| *rounds += 1);
            sleep(MOVES_EVERY).await;
        }
    }

    /// Returns when a browser shows pages.
    async fn awaken(&self) {
        loop {
            let wanted = self.wanted.notified();
            let looked = *self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if looked.elapsed() <= LOOKS_FOR {
                return;
            }
            wanted.await;
        }
    }

    async fn watch_hosts(self: Arc<Self>) {
        let mut asked: Option<Instant> = None;
        loop {
            self.awaken().await;
            let due = asked.is_none_or(|asked| asked.elapsed() >= HOSTS_EVERY);
            if due || self.known().stale {
                self.known().stale = false;
                asked = Some(Instant::now());
                self.ask_hosts().await;
            }
            sleep(MOVES_EVERY).await;
        }
    }

    async fn ask_hosts(self: &Arc<Self>) {
        let names: Vec<String> = self.known().hosts.keys().cloned().collect();
        let turns = Arc::new(Semaphore::new(HOSTS_AT_ONCE));
        let mut asking = JoinSet::new();
        for name in names {
            let (cluster, turns) = (Arc::clone(self), Arc::clone(&turns));
            asking.spawn(async move {
                let _turn = turns.acquire_owned().await;
                let client = cluster.agent_of(&name).unwrap_or_else(|| cluster.any());
                let census = ask(&client, &format!("/v1/hosts/{}", segment(&name))).await;
                if let Some(host) = cluster.known().hosts.get_mut(&name) {
                    host.take(census);
                }
            });
        }
        while asking.join_next().await.is_some() {}
    }

    async fn ask_for_moves(&self) {
        for (number, agent) in self.agents.iter().enumerate() {
            let migrations = ask(&agent.client, "/v1/migrations").await;
            let gangs = ask(&agent.client, GANGS).await;
            let mut known = self.known();
            let said = &mut known.said[number];
            match (migrations, gangs) {
                (Ok(migrations), Ok(gangs)) => {
                    *said = Said { migrations, gangs, problem: None };
                }
                (Err(problem), _) | (_, Err(problem)) => said.problem = Some(problem),
            }
        }
        self.known().note_running();
    }

    /// Those that are new.
    async fn ask_for_reports(&self) {
        let wanted = self.known().wanted_reports();
        for (number, operation) in wanted {
            let client = &self.agents[number].client;
            let path = format!("{}/report", operation.path());
            match operation {
                Operation::Migration(id) => {
                    let report: Result<Report, _> = ask(client, &path).await;
                    self.known().note_report(id, report.ok(), number);
                }
                Operation::Gang(id) => {
                    if let Ok(report) = ask::<GangReport>(client, &path).await {
                        self.known().gang_reports.insert(id, report);
                    }
                }
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn ask<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, String> {
    match timeout(ANSWER_MAX, client.get(path)).await {
        Ok(answer) => answer.map_err(|problem| problem.to_string()),
        Err(_) => Err(format!("no answer within {} s", ANSWER_MAX.as_secs())),
    }
}

#[cfg(test)]
impl Cluster {
    /// Without agents, and as if a round was through.
    pub(crate) fn example(known: Known) -> Self {
        Self {
            agents: Vec::new(),
            known: Mutex::new(known),
            looked: Mutex::new(Instant::now()),
            wanted: Notify::new(),
            rounds: watch::channel(1).0,
        }
    }
}
