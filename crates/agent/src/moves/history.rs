//! The migrations that are listed, and the reports of those that have ended.
//!
//! A switchover may be settled after its migration has ended, or after a restart of the agent:
//! then the report is changed, or written.

pub(super) mod ended;
pub(super) mod reports;
pub(super) mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use api::{Progress, Report};
use parking_lot::Mutex;
use switchover::journal::{Listed, Opened};
use switchover::source::Outcome;

use ended::ended_progress;
use reports::Reports;
pub(crate) use table::What;
use table::{LISTED_MAX, Table};

/// The migrations from this host, running and ended.
pub(crate) struct History {
    /// This host.
    agent: String,
    pub(super) reports: Reports,
    pub(super) table: Mutex<Table>,
}

impl History {
    /// With the newest reports in `dir`, which earlier runs of the agent have saved.
    pub(crate) fn open(agent: &str, dir: PathBuf) -> Self {
        let reports = Reports::new(dir);
        let mut earlier: Vec<(u64, Progress)> = match reports.newest(LISTED_MAX) {
            Ok(newest) => newest.map(|one| (one.started_unix_s, ended_progress(&one))).collect(),
            Err(error) => {
                tracing::warn!(%error, "the reports of earlier migrations can't be read");
                Vec::new()
            }
        };
        earlier.sort_by_key(|(started_unix_s, _)| std::cmp::Reverse(*started_unix_s));
        let mut table = Table::default();
        table.earlier = earlier.into_iter().map(|(_, progress)| progress).collect();
        Self { agent: agent.to_owned(), reports, table: Mutex::new(table) }
    }

    /// All running migrations, and the last ended ones; the latest first.
    pub(crate) fn list(&self) -> Vec<Progress> {
        self.table.lock().list()
    }

    /// Saves the report of a migration that has ended.
    pub(super) fn keep(&self, id: &str, mut report: Report) {
        self.save(&report);
        let settled = {
            let mut table = self.table.lock();
            let Some(entry) = table.entries.get_mut(id) else { return };
            let settled = entry.settled.take().is_some_and(|settled| settle(&mut report, &settled));
            entry.report = Some(Arc::new(report.clone()));
            settled
        };
        if settled {
            self.save(&report);
        }
    }

    /// Notes how a switchover was settled: the report of its migration may have it in doubt, or
    /// there may be none, because the agent ended during the migration.
    pub(crate) fn settled(&self, opened: &Opened, outcome: &Outcome) {
        let Some(listed) = &opened.listed else { return };
        if let Some(entry) = self.table.lock().entries.get_mut(listed.id.as_str())
            && entry.report.is_none()
        {
            entry.settled = Some(outcome.clone());
            return;
        }
        let mut report = self.known(listed).unwrap_or_else(|| self.interrupted(opened, listed));
        if settle(&mut report, outcome) {
            self.replace(report);
        }
    }

    /// Notes that a switchover can't be settled yet, if its migration has no report.
    pub(crate) fn in_doubt(&self, opened: &Opened) {
        let Some(listed) = &opened.listed else { return };
        let is_listed = self.table.lock().entries.contains_key(listed.id.as_str());
        if !is_listed && self.known(listed).is_none() {
            self.replace(self.interrupted(opened, listed));
        }
    }

    /// The report of a migration that has ended.
    fn known(&self, listed: &Listed) -> Option<Report> {
        let id = listed.id.as_str();
        let kept = self.table.lock().entries.get(id).and_then(|entry| entry.report.clone());
        match kept {
            Some(report) => Some((*report).clone()),
            None => self.reports.read(id).ok().flatten(),
        }
    }

    /// The report of a migration during which the agent ended. What it had measured is lost.
    fn interrupted(&self, opened: &Opened, listed: &Listed) -> Report {
        let Opened { vm, peer, .. } = opened;
        let progress = Progress {
            elapsed_s: unix_s().saturating_sub(listed.started_unix_s) as f64,
            ..Progress::new((listed.id.as_str(), vm), (&self.agent, peer), 0)
        };
        let why = format!(
            "the agent of {} ended during the move, and it is not settled yet where {vm} is. \
             `droveway show {vm}` there shows what to do",
            self.agent
        );
        let outcome = api::Outcome::Failed(why);
        let report = Report::empty(&progress, listed.started_unix_s, outcome);
        Report { in_doubt: true, ..report }
    }

    fn replace(&self, report: Report) {
        self.save(&report);
        let mut table = self.table.lock();
        let progress = ended_progress(&report);
        if let Some(entry) = table.entries.get_mut(&report.id) {
            entry.report = Some(Arc::new(report));
        } else if let Some(one) = table.earlier.iter_mut().find(|one| one.id == report.id) {
            *one = progress;
        } else {
            table.earlier.insert(0, progress);
        }
    }

    fn save(&self, report: &Report) {
        if let Err(error) = self.reports.save(report) {
            tracing::warn!(id = report.id, %error, "the migration's report can't be saved");
        }
    }
}

/// Writes into a report how its switchover was settled. Returns whether that was open.
fn settle(report: &mut Report, outcome: &Outcome) -> bool {
    if !report.in_doubt {
        return false;
    }
    report.in_doubt = false;
    report.settled_unix_s = Some(unix_s());
    report.outcome = match outcome {
        Outcome::Moved => api::Outcome::Done,
        Outcome::Stays { reason } => {
            api::Outcome::Failed(format!("{reason}. The VM stays where it was"))
        }
        Outcome::Lost { reason } => api::Outcome::Failed(format!("the VM ended: {reason}")),
    };
    true
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
