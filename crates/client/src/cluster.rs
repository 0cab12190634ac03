//! The state of hosts, migrations and gangs as agents report it, kept up to date while it is
//! shown: in a browser with the dashboard's pages, or in a terminal.

mod ended;
#[cfg(any(test, feature = "example"))]
pub mod example;
mod known;
mod trace;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use api::{GangReport, HostInfo, Report};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::{Client, GANGS, Operation, Problem, segment};
pub use ended::{Ended, EndedAs};
use known::AgentAnswers;
pub use known::{HostState, Known, Running};
pub use trace::Point;

/// The interval between queries about migrations.
const MOVES_EVERY: Duration = Duration::from_secs(1);
/// The interval between queries about hosts, for each of which an agent asks its QEMUs.
const HOSTS_EVERY: Duration = Duration::from_secs(10);
/// The interval of checks while a caller waits for hosts' answers.
const HOSTS_SOON: Duration = Duration::from_millis(20);
/// A browser that makes no request for this long has been closed.
const LOOKS_FOR: Duration = Duration::from_secs(60);
/// How long an answer may take; an agent waits up to 15 s for another agent.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// How long a page waits for a first answer, and a round for agents that have answered so far.
const FIRST_MAX: Duration = Duration::from_secs(3);
/// Hosts that are asked in parallel.
const HOSTS_AT_ONCE: usize = 8;

/// The agents, and their latest answers.
pub struct Cluster {
    agents: Vec<Agent>,
    known: Mutex<Known>,
    looked: Mutex<Instant>,
    wanted: Notify,
    /// Completed rounds of queries.
    rounds: watch::Sender<u64>,
}

/// An agent with a direct connection.
struct Agent {
    client: Arc<Client>,
    /// Its host, once it has answered.
    host: OnceLock<String>,
}

/// Agents that are being queried.
#[derive(Default)]
struct Asking {
    numbers: HashSet<usize>,
    tasks: JoinSet<usize>,
}

impl Cluster {
    /// Asks each agent for its host and peers. It is an error only if none answers: the others
    /// are asked again in each round.
    ///
    /// # Errors
    /// If no agent answers.
    pub async fn meet(clients: Vec<Client>) -> Result<Self, Problem> {
        let mut known = Known::default();
        known.stale = true;
        known.answers.resize_with(clients.len(), AgentAnswers::default);
        let agent = |client| Agent { client: Arc::new(client), host: OnceLock::new() };
        let cluster = Self {
            agents: clients.into_iter().map(agent).collect(),
            known: Mutex::new(known),
            looked: Mutex::new(Instant::now()),
            wanted: Notify::new(),
            rounds: watch::channel(0).0,
        };
        let mut silent = None;
        for (number, answer) in cluster.ask_for_peers().await {
            match answer {
                Ok(info) => cluster.note_host(number, info),
                Err(problem) => {
                    cluster.known().answers[number].problem = Some(problem.to_string());
                    silent = Some(problem);
                }
            }
        }
        match silent {
            Some(problem) if cluster.agents.iter().all(|one| one.host.get().is_none()) => {
                Err(problem)
            }
            _ => Ok(cluster),
        }
    }

    /// Asks each agent for its host and peers; the answers have the agents' numbers. The first is
    /// the command's own, and without it there is little to show.
    async fn ask_for_peers(&self) -> Vec<(usize, Result<HostInfo, Problem>)> {
        let mut asking = JoinSet::new();
        for (number, agent) in self.agents.iter().enumerate() {
            let client = Arc::clone(&agent.client);
            let time = if number == 0 { ANSWER_MAX } else { FIRST_MAX };
            asking.spawn(
                async move { (number, within::<HostInfo>(time, &client, "/v1/host").await) },
            );
        }
        let mut answers = Vec::new();
        // A fault in one of the tasks is reported by the runtime.
        while let Some(Ok(answer)) = asking.join_next().await {
            answers.push(answer);
        }
        answers
    }

    /// Notes which hosts have joined and left the cluster.
    async fn note_peers(&self) {
        let answers = self.ask_for_peers().await;
        let mut listed = HashSet::new();
        let mut answered = 0;
        for (number, answer) in answers {
            // The hosts that a silent agent may know of stay.
            let Ok(info) = answer else { continue };
            answered += 1;
            listed.extend(info.peers.iter().map(|peer| peer.name.clone()));
            listed.insert(info.name.clone());
            self.note_host(number, info);
        }
        if answered == self.agents.len() {
            self.known().hosts.retain(|name, _| listed.contains(name));
        }
    }

    fn note_host(&self, number: usize, info: HostInfo) {
        let mut known = self.known();
        let racks = info.peers.into_iter().map(|peer| (peer.name, peer.rack));
        for (name, rack) in racks.chain([(info.name.clone(), info.rack)]) {
            known.hosts.entry(name).or_default().rack = rack;
        }
        // A name that is known stays.
        let _ = self.agents[number].host.set(info.name);
    }

    /// The known state.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps everything up to date for a while from now on; waits for a first answer.
    pub async fn refresh(&self) {
        let mut rounds = self.rounds.subscribe();
        let was_asleep = {
            let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *looked, Instant::now()).elapsed() > LOOKS_FOR
        };
        self.wanted.notify_waiters();
        if was_asleep || *rounds.borrow_and_update() == 0 {
            // Without an answer, the known state is shown.
            let _ = timeout(FIRST_MAX, rounds.changed()).await;
        }
    }

    /// Waits for the next round of queries about migrations.
    pub async fn next_round(&self) {
        // This can't fail: `self` owns the sender.
        let _ = self.rounds.subscribe().changed().await;
    }

    /// Waits until each host has answered, or could not be queried.
    pub async fn wait_for_hosts(&self) {
        let all = async {
            while !self.known().hosts.values().all(HostState::was_queried) {
                sleep(HOSTS_SOON).await;
            }
        };
        // After a timeout, the known state is shown.
        let _ = timeout(ANSWER_MAX, all).await;
    }

    /// An agent for requests that any agent can answer.
    #[must_use]
    pub fn any(&self) -> Arc<Client> {
        let number = self.known().answers.iter().position(|answers| answers.problem.is_none());
        Arc::clone(&self.agents[number.unwrap_or(0)].client)
    }

    /// The agent with this number, as in [`Running::agent`].
    #[must_use]
    pub fn agent(&self, number: usize) -> Option<Arc<Client>> {
        self.agents.get(number).map(|agent| Arc::clone(&agent.client))
    }

    /// The agent of a host, if there is a direct connection to it.
    #[must_use]
    pub fn agent_of(&self, host: &str) -> Option<Arc<Client>> {
        let of_host = |agent: &&Agent| agent.host.get().is_some_and(|name| name == host);
        let agent = self.agents.iter().find(of_host)?;
        Some(Arc::clone(&agent.client))
    }

    /// Has hosts queried at once, because an order was given.
    pub fn hurry(&self) {
        self.known().stale = true;
    }

    /// Keeps everything up to date, for ever.
    pub async fn watch(self: Arc<Self>) {
        let hosts = tokio::spawn(Arc::clone(&self).watch_hosts());
        let _hosts = AbortOnDrop(hosts);
        let mut asking = Asking::default();
        loop {
            self.awaken().await;
            self.ask_agents(&mut asking).await;
            self.rounds.send_modify(|rounds| *rounds += 1);
            sleep(MOVES_EVERY).await;
        }
    }

    /// Returns once the state is shown somewhere.
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
        self.note_peers().await;
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

    /// Asks all agents, and waits a while for those that have answered so far.
    async fn ask_agents(self: &Arc<Self>, asking: &mut Asking) {
        let Asking { numbers, tasks } = asking;
        let mut awaited = HashSet::new();
        for number in 0..self.agents.len() {
            if numbers.insert(number) {
                tasks.spawn(Arc::clone(self).ask_agent(number));
                if self.known().answers[number].problem.is_none() {
                    awaited.insert(number);
                }
            }
        }
        let answers = async {
            while !awaited.is_empty() {
                let Some(Ok(number)) = tasks.join_next().await else { return };
                numbers.remove(&number);
                awaited.remove(&number);
            }
        };
        // The next round has what is late.
        let _ = timeout(FIRST_MAX, answers).await;
        while let Some(Ok(number)) = tasks.try_join_next() {
            numbers.remove(&number);
        }
        self.known().note_running();
    }

    /// Asks one agent for its migrations and gangs, and for new reports; returns its number.
    async fn ask_agent(self: Arc<Self>, number: usize) -> usize {
        let answers = self.ask_for_moves(number).await;
        let is_silent = answers.problem.is_some();
        {
            let mut known = self.known();
            let last = &mut known.answers[number];
            match answers.problem {
                // Its earlier answers are still shown.
                Some(problem) => last.problem = Some(problem),
                None => *last = answers,
            }
        }
        if !is_silent {
            self.ask_for_reports(number).await;
        }
        number
    }

    async fn ask_for_moves(&self, number: usize) -> AgentAnswers {
        let Agent { client, host } = &self.agents[number];
        let asked = async {
            if host.get().is_none() {
                self.note_host(number, ask(client, "/v1/host").await?);
            }
            let migrations = ask(client, "/v1/migrations").await?;
            Ok::<_, String>((migrations, ask(client, GANGS).await?))
        };
        match asked.await {
            Ok((migrations, gangs)) => AgentAnswers { migrations, gangs, problem: None },
            Err(problem) => AgentAnswers { problem: Some(problem), ..AgentAnswers::default() },
        }
    }

    async fn ask_for_reports(&self, number: usize) {
        let unread = self.known().reports_to_read();
        for (_, operation) in unread.into_iter().filter(|(of, _)| *of == number) {
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
    within(ANSWER_MAX, client, path).await.map_err(|problem| problem.to_string())
}

async fn within<T: DeserializeOwned>(
    time: Duration,
    client: &Client,
    path: &str,
) -> Result<T, Problem> {
    match timeout(time, client.get(path)).await {
        Ok(answer) => answer,
        Err(_) => Err(client.disconnected(format!("no answer within {} s", time.as_secs()))),
    }
}

#[cfg(test)]
mod tests;

#[cfg(any(test, feature = "example"))]
impl Cluster {
    /// A cluster without agents, after one round.
    #[must_use]
    pub fn example(known: Known) -> Self {
        Self {
            agents: Vec::new(),
            known: Mutex::new(known),
            looked: Mutex::new(Instant::now()),
            wanted: Notify::new(),
            rounds: watch::channel(1).0,
        }
    }
}
