//! Droveway: an agent on each host of all racks, and a migration for each VM of a gang, all started
//! together, or the gang by one command, or by one for each host that it leaves.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use api::{GangReport, MoveReport, Outcome, Report};
use simulator::Share;

use super::{GangContender, GangGround, GangMoved, Member};
use crate::contender::Moved;
use crate::contender::droveway::{moved, report, wait_scanned, within};
use lab::agent::{Agent, agents, binary};
use lab::error::{LabError, Result, SystemContext};
use lab::hosts::RackHost;
use lab::program;

/// How the VMs are ordered to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Orders {
    /// `droveway migrate` for each, all at once.
    Each,
    /// One `droveway gang`, which moves as many at a time as it does by default.
    Gang,
    /// `droveway evacuate` for each host, all at once. It chooses where VMs go.
    Evacuate,
}

/// Agents on all hosts, and guests under them.
pub struct DrovewayGang {
    share: Share,
    orders: Orders,
    /// The agents of all hosts.
    agents: Vec<Agent>,
    reports: Vec<Report>,
}

/// Arguments that set sharing for a command of `droveway`; none if it lacks the option.
///
/// # Errors
/// If `droveway` can't be run.
pub fn sharing(command: &str, share: Share) -> Result<Option<Vec<String>>> {
    let words = ["--share".to_owned(), share.to_string()];
    // Arguments before `--help` are parsed first: an unknown one fails.
    let asked = program::run(Command::new(binary()).arg(command).args(&words).arg("--help"))?;
    Ok(asked.status.success().then(|| words.to_vec()))
}

impl DrovewayGang {
    /// A contender that shares content this far.
    #[must_use]
    pub fn new(share: Share) -> Self {
        Self { share, orders: Orders::Each, agents: Vec::new(), reports: Vec::new() }
    }

    /// The same by one command for all VMs.
    #[must_use]
    pub fn by_one_command(share: Share) -> Self {
        Self { orders: Orders::Gang, ..Self::new(share) }
    }

    /// The same by one command for each host that VMs leave.
    #[must_use]
    pub fn by_host(share: Share) -> Self {
        Self { orders: Orders::Evacuate, ..Self::new(share) }
    }

    fn agent(&self, host: &RackHost) -> Result<&Agent> {
        let agent = self.agents.iter().find(|agent| agent.host_name() == host.name);
        agent.ok_or_else(|| LabError::Missing { what: format!("the agent of {}", host.name) })
    }

    fn failed(&self, reason: String) -> LabError {
        LabError::Migration { contender: self.name(), reason }
    }

    fn sharing(&self) -> Result<Vec<String>> {
        match sharing("migrate", self.share)? {
            Some(words) => Ok(words),
            // As a droveway that can't share.
            None if self.share == Share::Off => Ok(Vec::new()),
            None => Err(self.failed("`droveway migrate` can't be told so".to_owned())),
        }
    }

    fn command(
        &self,
        ground: &GangGround<'_>,
        member: &Member<'_>,
        to: &RackHost,
        sharing: &[String],
    ) -> Result<Command> {
        let goal = ground.downtime_goal.as_millis().to_string();
        let arguments = ["migrate", &member.spec.name, &to.name, "--json", "--downtime-ms", &goal];
        let mut command = self.agent(member.from)?.command(&member.from.host, &arguments);
        command.args(sharing);
        Ok(command)
    }

    /// Moves all by one command.
    fn as_gang(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved> {
        let going = members.iter().filter_map(|member| Some((member, member.to?)));
        let going: Vec<_> = going.collect();
        let (first, _) = going.first().ok_or_else(|| self.failed("no VM moves".to_owned()))?;
        let goal = ground.downtime_goal.as_millis().to_string();
        let arguments = ["gang", "--json", "--downtime-ms", &goal];
        let mut command = self.agent(first.from)?.command(&first.from.host, &arguments);
        command.args(self.sharing()?).args(
            going.iter().map(|(member, to)| {
                format!("{}/{}={}", member.from.name, member.spec.name, to.name)
            }),
        );
        self.by_gangs(ground, members, vec![(*first, command)])
    }

    /// Moves the VMs of each host by one command.
    fn evacuate(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved> {
        let going = members.iter().filter(|member| member.to.is_some());
        let firsts: BTreeMap<&str, &Member<'_>> =
            going.map(|member| (member.from.name.as_str(), member)).collect();
        let targets = ground.racks.targets().into_iter().map(|host| host.name.as_str());
        let (targets, sharing) = (targets.collect::<Vec<_>>().join(","), self.sharing()?);
        let goal = ground.downtime_goal.as_millis().to_string();
        let mut commands = Vec::new();
        for (host, member) in firsts {
            let arguments = ["evacuate", host, "--to", &targets, "--json", "--downtime-ms", &goal];
            let mut command = self.agent(member.from)?.command(&member.from.host, &arguments);
            command.args(&sharing);
            commands.push((member, command));
        }
        self.by_gangs(ground, members, commands)
    }

    /// Runs these commands, each of which moves a gang. When each VM began and ran isn't known from
    /// outside.
    fn by_gangs(
        &mut self,
        ground: &GangGround<'_>,
        members: &[Member<'_>],
        commands: Vec<(&Member<'_>, Command)>,
    ) -> Result<GangMoved> {
        let started = Instant::now();
        let ended = together(commands, ground.timeout)?;
        if ended.iter().any(|(_, _, ended)| *ended - started >= ground.timeout) {
            return Err(LabError::Late { contender: self.name(), waited: ground.timeout });
        }
        let mut gangs = Vec::new();
        for (_, output, ended) in ended {
            let gang: Option<GangReport> = serde_json::from_slice(&output.stdout).ok();
            let gang = gang.ok_or_else(|| {
                self.failed(format!("no report: {}", String::from_utf8_lossy(&output.stderr)))
            })?;
            gangs.push((gang, ended));
        }
        let mut vms = Vec::new();
        for member in members.iter().filter(|member| member.to.is_some()) {
            let is_its =
                |one: &&MoveReport| one.vm == member.spec.name && one.from == member.from.name;
            let found = gangs.iter().find_map(|(gang, ended)| {
                let id = gang.moves.iter().find(is_its)?.migration.as_deref()?;
                Some((id, *ended))
            });
            let (id, ran) =
                found.ok_or_else(|| self.failed(format!("{}: {gangs:?}", member.spec.name)))?;
            let report = ["report", id, "--json"];
            let mut report = self.agent(member.from)?.command(&member.from.host, &report);
            let report = self.arrived(member, &program::run(&mut report)?)?;
            let downtime = Duration::from_secs_f64(report.downtime_ms.unwrap_or(0.0) / 1e3);
            let passes = Some(report.passes.into());
            vms.push(Moved { began: started, ran, prepare: Duration::ZERO, downtime, passes });
            self.reports.push(report);
        }
        Ok(GangMoved::new(started, vms))
    }

    /// The report of a migration that should have moved its VM.
    fn arrived(&self, member: &Member<'_>, output: &Output) -> Result<Report> {
        let vm = &member.spec.name;
        let report = report(output).ok_or_else(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            let log = self.agent(member.from).map_or_else(|_| String::new(), Agent::log_text);
            self.failed(format!("{vm}: no report: {said} {log}"))
        })?;
        if report.outcome == Outcome::Done {
            return Ok(report);
        }
        Err(self.failed(format!("{vm}: {:?}", report.outcome)))
    }
}

impl GangContender for DrovewayGang {
    fn name(&self) -> String {
        match self.orders {
            Orders::Each => format!("droveway-{}", self.share),
            Orders::Gang => "droveway-gang".to_owned(),
            Orders::Evacuate => "droveway-evacuate".to_owned(),
        }
    }

    fn chooses_hosts(&self) -> bool {
        self.orders == Orders::Evacuate
    }

    fn start(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<()> {
        // Fail before anything boots in vain.
        self.sharing()?;
        self.agents = agents(ground.racks)?;
        for Member { spec, from, .. } in members {
            let mut run = self.agent(from)?.command(&from.host, &["run", &spec.name, "--"]);
            program::output(run.args(spec.argv(ground.kit, &ground.kit.qemu)))?;
        }
        Ok(())
    }

    fn rest(&mut self, members: &[Member<'_>]) -> Result<()> {
        members.iter().try_for_each(|Member { spec, from, .. }| {
            wait_scanned(self.agent(from)?, &from.host, &spec.name)
        })
    }

    fn migrate(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved> {
        self.reports.clear();
        match self.orders {
            Orders::Each => {}
            Orders::Gang => return self.as_gang(ground, members),
            Orders::Evacuate => return self.evacuate(ground, members),
        }
        let sharing = self.sharing()?;
        let going = members.iter().filter_map(|member| Some((member, member.to?)));
        let command = |(member, to)| Ok((member, self.command(ground, member, to, &sharing)?));
        let moves: Vec<_> = going.map(command).collect::<Result<_>>()?;
        let started = Instant::now();
        let ended = together(moves, ground.timeout)?;
        if ended.iter().any(|(_, _, ended)| *ended - started >= ground.timeout) {
            return Err(LabError::Late { contender: self.name(), waited: ground.timeout });
        }
        let mut vms = Vec::new();
        for (member, output, ended) in ended {
            let report = self.arrived(member, &output)?;
            vms.push(moved(&report, started, ended));
            self.reports.push(report);
        }
        Ok(GangMoved::new(started, vms))
    }

    fn reports(&self) -> &[Report] {
        &self.reports
    }

    fn stop(&mut self) {
        self.agents.clear();
    }
}

/// Runs commands at the same time; returns each one's output and when it ended.
fn together<'m, 'g>(
    moves: Vec<(&'m Member<'g>, Command)>,
    timeout: Duration,
) -> Result<Vec<(&'m Member<'g>, Output, Instant)>> {
    thread::scope(|scope| {
        let mut running = Vec::new();
        for (member, mut command) in moves {
            let run = move || (within(&mut command, timeout), Instant::now());
            let thread = thread::Builder::new().name(member.spec.name.clone());
            let thread = thread.spawn_scoped(scope, run).doing("start a thread")?;
            running.push((member, thread));
        }
        let end =
            |(member, thread): (_, thread::ScopedJoinHandle<'_, (Result<Output>, Instant)>)| {
                let joined = thread.join();
                let (output, ended) =
                    joined.unwrap_or_else(|fault| std::panic::resume_unwind(fault));
                Ok((member, output?, ended))
            };
        running.into_iter().map(end).collect()
    })
}
