//! The state that follows from all agents' answers.

use std::collections::{BTreeMap, HashMap, HashSet};

use api::{GangProgress, GangReport, HostCensus, HostVm, MoveState, Progress, Report, VmStatus};

use super::ended::{Ended, EndedAs};
use super::trace::{Point, Traces};
use crate::Operation;

/// Reports that are read per round; each may have thousands of samples.
const REPORTS_AT_ONCE: usize = 20;
/// Attempts to read a report, which may not be written yet when its migration has ended.
const REPORT_TRIES: u8 = 5;

/// The known state of the cluster.
#[derive(Default)]
pub struct Known {
    /// All hosts by name.
    pub hosts: BTreeMap<String, HostState>,
    /// The latest answers of agents, by their numbers.
    pub(super) answers: Vec<AgentAnswers>,
    ended: HashMap<String, Ended>,
    /// Failed attempts to read reports.
    missing: HashMap<String, u8>,
    pub(super) gang_reports: HashMap<String, GangReport>,
    traces: Traces,
    /// Whether hosts have not been queried since a migration started or ended.
    pub(super) stale: bool,
}

/// A host of the cluster.
#[derive(Debug, Default)]
pub struct HostState {
    /// Its rack, if it has one.
    pub rack: Option<String>,
    /// Its memory and VMs, by its latest answer.
    pub census: Option<HostCensus>,
    /// Why it can't be queried.
    pub problem: Option<String>,
}

/// The latest answers of one agent.
#[derive(Default)]
pub(super) struct AgentAnswers {
    pub(super) migrations: Vec<Progress>,
    pub(super) gangs: Vec<GangProgress>,
    pub(super) problem: Option<String>,
}

/// A running migration.
#[derive(Clone, Copy)]
pub struct Running<'k> {
    /// Its latest progress.
    pub progress: &'k Progress,
    /// The agent that can cancel it; none if only the coordinator of its gang, or another host's
    /// agent, can.
    pub agent: Option<usize>,
    /// The gang that it is part of.
    pub gang: Option<&'k str>,
    /// Its rates so far.
    pub points: &'k [Point],
}

impl HostState {
    pub(super) fn was_queried(&self) -> bool {
        self.census.is_some() || self.problem.is_some()
    }

    /// The total RAM of its VMs.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        let vms = self.census.iter().flat_map(|census| &census.vms);
        vms.fold(0, |sum, vm| sum.saturating_add(vm.ram_bytes))
    }

    /// Memory for arriving VMs; none if the host doesn't report it.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        self.census.as_ref()?.free_bytes
    }

    pub(super) fn take(&mut self, census: Result<HostCensus, String>) {
        match census {
            Ok(census) => {
                *self = Self { rack: self.rack.take(), census: Some(census), problem: None }
            }
            Err(problem) => self.problem = Some(problem),
        }
    }
}

impl Known {
    /// A VM of a host.
    #[must_use]
    pub fn vm(&self, host: &str, vm: &str) -> Option<&HostVm> {
        let census = self.hosts.get(host)?.census.as_ref()?;
        census.vms.iter().find(|one| one.name == vm)
    }

    /// All VMs, with their hosts.
    pub fn vms(&self) -> impl Iterator<Item = (&str, &HostVm)> {
        self.hosts.iter().flat_map(|(host, state)| {
            let vms = state.census.iter().flat_map(|census| &census.vms);
            vms.map(move |vm| (host.as_str(), vm))
        })
    }

    /// How many VMs there are. One that arrives, or is in doubt, may be another host's.
    #[must_use]
    pub fn vm_count(&self) -> usize {
        let mut at_home: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, vm) in self.vms() {
            let is_at_home = !matches!(vm.status, VmStatus::Arriving | VmStatus::InDoubt);
            *at_home.entry(&vm.name).or_default() += usize::from(is_at_home);
        }
        at_home.into_values().map(|hosts| hosts.max(1)).sum()
    }

    /// Memory for arriving VMs, on all hosts that report it.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.hosts.values().filter_map(HostState::free_bytes).fold(0, u64::saturating_add)
    }

    /// All running migrations, including those of gangs, by VM.
    #[must_use]
    pub fn running(&self) -> Vec<Running<'_>> {
        let mut all: Vec<Running<'_>> = Vec::new();
        let mut seen = HashSet::new();
        let direct = self.answers.iter().enumerate().flat_map(|(number, answers)| {
            answers.migrations.iter().map(move |progress| (progress, Some(number)))
        });
        for (progress, agent) in direct {
            if progress.outcome.is_none() && seen.insert(&progress.id) {
                let points = self.traces.of(&progress.id);
                all.push(Running { progress, agent, gang: None, points });
            }
        }
        for gang in self.gangs().filter(|gang| gang.outcome.is_none()) {
            let moving = gang.moves.iter().filter(|one| one.state == MoveState::Moving);
            for progress in moving.filter_map(|one| one.progress.as_ref()) {
                if let Some(known) = all.iter_mut().find(|one| one.progress.id == progress.id) {
                    known.gang = Some(&gang.id);
                } else if progress.outcome.is_none() && seen.insert(&progress.id) {
                    let points = self.traces.of(&progress.id);
                    all.push(Running { progress, agent: None, gang: Some(&gang.id), points });
                }
            }
        }
        // What a host's census has is older than the answers of its agent.
        seen.extend(self.answers.iter().flat_map(|answers| &answers.migrations).map(|one| &one.id));
        seen.extend(
            self.gangs().flat_map(|gang| &gang.moves).filter_map(|one| one.migration.as_ref()),
        );
        let others = self.hosts.values().filter_map(|host| host.census.as_ref());
        for progress in others.flat_map(|census| &census.moving) {
            if seen.insert(&progress.id) {
                let points = self.traces.of(&progress.id);
                all.push(Running { progress, agent: None, gang: None, points });
            }
        }
        all.sort_by(|one, other| one.progress.vm.cmp(&other.progress.vm));
        all
    }

    /// All gangs, the running ones first.
    pub fn gangs(&self) -> impl Iterator<Item = &GangProgress> {
        let of = |running: bool| {
            let all = self.answers.iter().flat_map(|answers| &answers.gangs);
            all.filter(move |gang| gang.outcome.is_none() == running)
        };
        of(true).chain(of(false))
    }

    /// The agent that coordinates a gang.
    #[must_use]
    pub fn coordinator(&self, gang: &str) -> Option<usize> {
        self.answers.iter().position(|answers| answers.gangs.iter().any(|one| one.id == gang))
    }

    /// Why an agent's migrations are not up to date.
    pub fn problems(&self) -> impl Iterator<Item = &str> {
        self.answers.iter().filter_map(|answers| answers.problem.as_deref())
    }

    /// Hosts whose VMs are not known, or not as they are now.
    pub fn silent_hosts(&self) -> impl Iterator<Item = &str> {
        let silent = self.hosts.iter().filter(|(_, state)| state.problem.is_some());
        silent.map(|(name, _)| name.as_str())
    }

    /// Migrations that have ended, the latest first.
    #[must_use]
    pub fn history(&self) -> Vec<Ended> {
        let mut all: Vec<Ended> =
            self.ended.values().filter(|ended| !ended.vm.is_empty()).cloned().collect();
        let of_gangs = self.gang_reports.values().flat_map(Ended::of_gang);
        for ended in of_gangs {
            match all.iter_mut().find(|one| !one.id.is_empty() && one.id == ended.id) {
                Some(known) => known.gang = ended.gang,
                None => all.push(ended),
            }
        }
        all.sort_by(|one, other| {
            (other.ended_unix_s, &one.vm, &one.id).cmp(&(one.ended_unix_s, &other.vm, &other.id))
        });
        all
    }

    /// Adds the present rates to the traces; hosts are stale if a migration has started or ended.
    pub(super) fn note_running(&mut self) {
        let mut traces = std::mem::take(&mut self.traces);
        let running: Vec<Progress> =
            self.running().iter().map(|one| one.progress.clone()).collect();
        let before = traces.ids();
        traces.note(running.iter());
        self.stale |= before != traces.ids();
        self.traces = traces;
    }

    /// Adds a report; one that can't be read is retried a few times, and is not shown.
    pub(super) fn note_report(&mut self, id: String, report: Option<Report>, agent: usize) {
        let missing = self.missing.entry(id.clone()).or_default();
        *missing += u8::from(report.is_none());
        if let Some(report) = report {
            self.ended.insert(id, Ended::of_report(&report, agent));
        } else if *missing >= REPORT_TRIES {
            self.ended.insert(id, Ended::default());
        }
    }

    /// Reports of ended migrations and gangs that are still to be read, with their agents' numbers.
    pub(super) fn reports_to_read(&mut self) -> Vec<(usize, Operation)> {
        // Forget what agents no longer list.
        let migrations = self.answers.iter().flat_map(|answers| &answers.migrations);
        let gangs: Vec<&GangProgress> =
            self.answers.iter().flat_map(|answers| &answers.gangs).collect();
        let ids = gangs.iter().map(|gang| gang.id.as_str());
        let listed: HashSet<&str> = migrations.map(|one| one.id.as_str()).chain(ids).collect();
        self.ended.retain(|id, _| listed.contains(id.as_str()));
        self.missing.retain(|id, _| listed.contains(id.as_str()));
        // A gang that was resumed keeps its id, and has another report when it ends again.
        self.gang_reports
            .retain(|id, report| gangs.iter().any(|gang| gang.id == *id && is_of(report, gang)));
        let mut unread = Vec::new();
        for (number, answers) in self.answers.iter().enumerate() {
            let migrations = answers.migrations.iter();
            let migrations = migrations
                .filter(|one| one.outcome.is_some() && !self.has_report(one))
                .map(|one| Operation::Migration(one.id.clone()));
            let gangs = answers.gangs.iter();
            let gangs = gangs
                .filter(|one| one.outcome.is_some() && !self.gang_reports.contains_key(&one.id))
                .map(|one| Operation::Gang(one.id.clone()));
            let all = migrations.chain(gangs).take(REPORTS_AT_ONCE);
            unread.extend(all.map(|operation| (number, operation)));
        }
        unread
    }

    /// Whether a migration's report is known, and not from before its switchover was settled.
    fn has_report(&self, migration: &Progress) -> bool {
        let known = self.ended.get(&migration.id);
        known.is_some_and(|one| migration.in_doubt || !matches!(one.result, EndedAs::InDoubt(_)))
    }
}

/// Whether a report is of the gang as it is now, and not of an earlier run of it.
fn is_of(report: &GangReport, gang: &GangProgress) -> bool {
    gang.outcome == report.outcome && gang.elapsed_s.total_cmp(&report.total_s).is_eq()
}

#[cfg(any(test, feature = "example"))]
impl Known {
    /// The state after these answers of one agent.
    #[must_use]
    pub fn example(
        hosts: Vec<HostCensus>,
        migrations: Vec<Progress>,
        gangs: Vec<GangProgress>,
        reports: Vec<Report>,
    ) -> Self {
        let mut known = Self::default();
        for census in hosts {
            let (name, rack) = (census.name.clone(), census.rack.clone());
            let state = HostState { rack, census: Some(census), problem: None };
            known.hosts.insert(name, state);
        }
        known.answers.push(AgentAnswers { migrations, gangs, problem: None });
        for report in reports {
            known.ended.insert(report.id.clone(), Ended::of_report(&report, 0));
        }
        known.note_running();
        known
    }
}

#[cfg(test)]
mod tests {
    use api::{GangOutcome, GangTotals, MoveProgress, Outcome};
    use report::example::example;
    use serde_json::json;

    use super::super::example::{host, moving};
    use super::*;

    fn gang(id: &str, moves: Vec<MoveProgress>) -> GangProgress {
        let totals = GangTotals::default();
        let notes = Vec::new();
        GangProgress { id: id.to_owned(), elapsed_s: 1.0, moves, totals, notes, outcome: None }
    }

    fn one(progress: Progress) -> MoveProgress {
        MoveProgress {
            vm: progress.vm.clone(),
            from: progress.from.clone(),
            to: progress.to.clone(),
            ram_bytes: progress.ram_bytes,
            state: MoveState::Moving,
            migration: Some(progress.id.clone()),
            reason: None,
            in_doubt: false,
            progress: Some(progress),
        }
    }

    #[test]
    fn a_gangs_migration_is_listed_once_with_the_agent_that_can_cancel_it() {
        let own = moving("web2");
        let other = Progress { id: "0badcafe".to_owned(), ..moving("web1") };
        let over = Progress { id: "1".to_owned(), outcome: Some(Outcome::Done), ..moving("web0") };
        let gang = gang("g1", vec![one(own.clone()), one(other)]);
        let known =
            Known::example(vec![host("host-a", &[])], vec![own, over], vec![gang], Vec::new());
        let running = known.running();
        let shown: Vec<_> = running
            .iter()
            .map(|one| (one.progress.vm.as_str(), one.agent, one.gang, one.points.len()))
            .collect();
        assert_eq!(shown, [("web1", None, Some("g1"), 1), ("web2", Some(0), Some("g1"), 1)]);
        assert_eq!(known.coordinator("g1"), Some(0));
        assert_eq!(known.coordinator("g2"), None);
    }

    #[test]
    fn a_move_between_other_hosts_is_shown_as_their_agents_report_it() {
        let other = Progress { id: "0badcafe".to_owned(), ..moving("web1") };
        let ended = Progress { id: "1".to_owned(), ..moving("web2") };
        let census = HostCensus { moving: vec![other, ended.clone()], ..host("host-b", &[]) };
        let over = Progress { outcome: Some(Outcome::Done), ..ended };
        let known = Known::example(vec![census], vec![over], Vec::new(), Vec::new());
        let running = known.running();
        let [one] = running.as_slice() else { panic!("{}", running.len()) };
        assert_eq!((one.progress.id.as_str(), one.agent, one.gang), ("0badcafe", None, None));
    }

    #[test]
    fn a_vm_that_two_hosts_list_is_one() {
        use VmStatus::{Arriving, InDoubt, Paused, Running};

        let at = |name: &str, statuses: &[(&str, VmStatus)]| {
            let names: Vec<&str> = statuses.iter().map(|(vm, _)| *vm).collect();
            let mut census = host(name, &names);
            for (vm, (_, status)) in census.vms.iter_mut().zip(statuses) {
                vm.status = *status;
            }
            census
        };
        let count = |a: &[(&str, VmStatus)], b: &[(&str, VmStatus)]| {
            let hosts = vec![at("host-a", a), at("host-b", b)];
            Known::example(hosts, Vec::new(), Vec::new(), Vec::new()).vm_count()
        };
        assert_eq!(count(&[("web1", Running)], &[("web1", Arriving), ("web2", Paused)]), 2);
        assert_eq!(count(&[("web1", InDoubt)], &[("web1", InDoubt)]), 1);
        assert_eq!(count(&[("web1", InDoubt)], &[("web1", Running)]), 1);
        assert_eq!(count(&[], &[("web1", Arriving)]), 1, "its source is silent");
        assert_eq!(count(&[("web1", Running)], &[("web1", Running)]), 2, "they differ");
    }

    #[test]
    fn the_history_has_each_migration_once_the_latest_first() {
        let mut early = example();
        early.id = "0badcafe".to_owned();
        early.started_unix_s -= 3600;
        let late = example();
        let report: GangReport = serde_json::from_value(json!({
            "id": "g1", "started_unix_s": 1, "total_s": 2.5, "parallel": 2, "atomic": false,
            "options": api::GangOptions::default(), "outcome": "failed", "notes": [],
            "moves": [
                { "vm": "web1", "from": "a", "to": "b", "ram_bytes": 1, "used_bytes": 1,
                  "state": "done", "migration": late.id, "reason": null, "figures": null },
                { "vm": "web7", "from": "a", "to": "b", "ram_bytes": 1, "used_bytes": 1,
                  "state": "failed", "migration": null, "reason": "why", "figures": null },
            ],
        }))
        .unwrap();
        let reports = vec![early.clone(), late.clone()];
        let mut known = Known::example(vec![host("host-a", &[])], Vec::new(), Vec::new(), reports);
        known.gang_reports.insert("g1".to_owned(), report);
        let history = known.history();
        let ids: Vec<&str> = history.iter().map(|one| one.id.as_str()).collect();
        assert_eq!(ids, [late.id.as_str(), early.id.as_str(), ""]);
        assert_eq!(history[0].gang.as_deref(), Some("g1"));
        assert_eq!(history[0].downtime_ms, late.downtime_ms);
        assert_eq!(
            (history[2].vm.as_str(), &history[2].result),
            ("web7", &EndedAs::Failed("why.".to_owned()))
        );
    }

    /// The report of a gang with one VM, as its agent has it.
    fn ended_gang(outcome: &str, total_s: f64, state: &str) -> GangReport {
        serde_json::from_value(json!({
            "id": "g1", "started_unix_s": 1, "total_s": total_s, "parallel": 2, "atomic": false,
            "options": api::GangOptions::default(), "outcome": outcome, "notes": [],
            "moves": [
                { "vm": "db1", "from": "a", "to": "b", "ram_bytes": 1, "used_bytes": 1,
                  "state": state, "migration": "0badcafe", "reason": null, "figures": null },
            ],
        }))
        .unwrap()
    }

    #[test]
    fn the_report_of_a_gang_that_was_resumed_is_read_again() {
        let listed =
            |outcome, elapsed_s| GangProgress { outcome, elapsed_s, ..gang("g1", Vec::new()) };
        let failed = listed(Some(GangOutcome::Failed), 2.5);
        let mut known = Known::example(Vec::new(), Vec::new(), vec![failed], Vec::new());
        assert_eq!(known.reports_to_read().len(), 1);
        known.gang_reports.insert("g1".to_owned(), ended_gang("failed", 2.5, "failed"));
        assert!(known.reports_to_read().is_empty());
        assert_eq!(known.history()[0].result, EndedAs::Failed("no reason is known.".to_owned()));
        // It runs again, and then it has ended, once with the same outcome.
        known.answers[0].gangs = vec![listed(None, 0.5)];
        assert!(known.reports_to_read().is_empty() && known.history().is_empty());
        for (outcome, elapsed_s) in [(GangOutcome::Failed, 3.5), (GangOutcome::Done, 4.5)] {
            known.gang_reports.insert("g1".to_owned(), ended_gang("failed", 2.5, "failed"));
            known.answers[0].gangs = vec![listed(Some(outcome), elapsed_s)];
            assert_eq!(known.reports_to_read().len(), 1, "{outcome:?}");
        }
    }

    #[test]
    fn a_move_that_goes_on_after_its_gang_is_not_in_the_history() {
        let mut known = Known::default();
        for (state, rows) in [("moving", 0), ("waiting", 0), ("cancelled", 1), ("done", 1)] {
            known.gang_reports.insert("g1".to_owned(), ended_gang("interrupted", 1.5, state));
            assert_eq!(known.history().len(), rows, "{state}");
        }
    }

    #[test]
    fn the_report_of_a_migration_that_was_settled_later_is_read_again() {
        let over =
            |outcome, in_doubt| Progress { outcome: Some(outcome), in_doubt, ..moving("web1") };
        let doubt = Outcome::Failed("host-b is silent".to_owned());
        let report =
            |outcome, in_doubt| Report { id: moving("web1").id, outcome, in_doubt, ..example() };
        let reports = vec![report(doubt.clone(), true)];
        let mut known = Known::example(Vec::new(), vec![over(doubt, true)], Vec::new(), reports);
        assert!(known.reports_to_read().is_empty());
        known.answers[0].migrations = vec![over(Outcome::Done, false)];
        assert_eq!(known.reports_to_read().len(), 1);
        known.note_report(moving("web1").id, Some(report(Outcome::Done, false)), 0);
        assert!(known.reports_to_read().is_empty());
        assert_eq!(known.history()[0].result, EndedAs::Done);
    }

    #[test]
    fn a_report_that_cannot_be_read_is_retried_a_few_times() {
        let over = Progress { outcome: Some(Outcome::Done), ..moving("web1") };
        let mut known =
            Known::example(vec![host("host-a", &[])], vec![over], Vec::new(), Vec::new());
        for _ in 0..REPORT_TRIES {
            assert_eq!(known.reports_to_read().len(), 1);
            known.note_report(moving("web1").id, None, 0);
        }
        assert!(known.reports_to_read().is_empty() && known.history().is_empty());
    }
}
