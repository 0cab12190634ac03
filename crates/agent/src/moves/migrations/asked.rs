//! What an agent answers about its migrations: lists, progress and reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{ErrorCode, Outcome, Phase, Progress, Report};
use engine::Watch;

use super::Migrations;
use crate::denied::Denied;
use crate::moves::history::What;
use crate::moves::history::ended::ended_progress;
use crate::moves::history::table::{Entry, has_ended};

/// How long to wait for the report of a migration that has ended.
const REPORT_WAIT: Duration = Duration::from_secs(30);

impl Migrations {
    /// All running migrations, and the last ended ones; the latest first.
    pub(crate) fn list(&self) -> Vec<Progress> {
        self.history.list()
    }

    /// The last listed migration that moved this VM away.
    pub(crate) fn last_that_moved(&self, vm: &str) -> Option<Progress> {
        let mut all = self.list().into_iter();
        // One within this host moved it nowhere.
        let is_it = |one: &Progress| one.vm == vm && one.from != one.to;
        all.find(|one| is_it(one) && one.outcome == Some(Outcome::Done))
    }

    /// The migrations of VMs that have not ended, without the disks that are carried concurrently
    /// with them.
    pub(crate) fn moving(&self) -> Vec<Progress> {
        let table = self.table();
        let of_vms = table.entries.values().filter(|entry| entry.what == What::Migration);
        of_vms.map(Entry::progress).filter(|progress| progress.outcome.is_none()).collect()
    }

    /// The progress of a migration, or how it ended.
    pub(crate) fn show(&self, id: &str) -> Result<Progress, Denied> {
        if let Some(entry) = self.table().entries.get(id) {
            return Ok(entry.progress());
        }
        Ok(ended_progress(&*self.saved(id)?))
    }

    /// Blocks until there is a state newer than `version`, at most `timeout`.
    ///
    /// The last state, which has an outcome, is returned only once the VM is removed or freed here
    /// and the report is available.
    pub(crate) fn wait(
        &self,
        id: &str,
        version: u64,
        timeout: Duration,
    ) -> Result<(u64, Progress), Denied> {
        let watch = match self.table().entries.get(id) {
            Some(entry) if entry.report.is_none() => Arc::clone(&entry.watch),
            Some(entry) => return Ok((version, entry.progress())),
            None => return Ok((version, ended_progress(&*self.saved(id)?))),
        };
        let (version, progress) = watch.wait(version, timeout);
        if progress.outcome.is_none() {
            // A panic ends a migration without an outcome.
            let ended = self.table().entries.get(id).is_some_and(|e| e.report.is_some());
            return if ended { Ok((version, self.show(id)?)) } else { Ok((version, progress)) };
        }
        // Waits until the report is available.
        self.report(id)?;
        Ok((version, self.show(id)?))
    }

    /// Blocks until the migration is in another phase than `seen`, or has ended, at most
    /// `timeout`.
    pub(crate) fn wait_phase(
        &self,
        id: &str,
        seen: Option<Phase>,
        timeout: Duration,
    ) -> Result<Progress, Denied> {
        let until = Instant::now() + timeout;
        let (mut version, mut progress) = (0, self.show(id)?);
        while progress.outcome.is_none() && Some(progress.phase) == seen {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (version, progress) = self.wait(id, version, left)?;
        }
        Ok(progress)
    }

    /// The report of a migration; waits for one that is just ending.
    pub(crate) fn report(&self, id: &str) -> Result<Arc<Report>, Denied> {
        let mut table = self.table();
        let deadline = Instant::now() + REPORT_WAIT;
        loop {
            let Some(entry) = table.entries.get(id) else {
                drop(table);
                return self.saved(id);
            };
            if let Some(report) = &entry.report {
                return Ok(Arc::clone(report));
            }
            let ending = entry.watch.progress().1.outcome.is_some();
            if !ending || self.ended.wait_until(&mut table, deadline).timed_out() {
                let text = format!("migration {id} is still running");
                return Err(Denied::Coded(ErrorCode::MigrationRunning, text));
            }
        }
    }

    /// A migration that has not ended.
    pub(super) fn running(&self, id: &str) -> Result<(Arc<Watch>, Progress), Denied> {
        let table = self.table();
        let Some(entry) = table.entries.get(id) else {
            drop(table);
            self.saved(id)?;
            return Err(has_ended(id));
        };
        let progress = entry.progress();
        if progress.outcome.is_some() {
            return Err(has_ended(id));
        }
        Ok((Arc::clone(&entry.watch), progress))
    }

    pub(super) fn saved(&self, id: &str) -> Result<Arc<Report>, Denied> {
        match self.history.reports.read(id) {
            Ok(Some(report)) => Ok(Arc::new(report)),
            Ok(None) => {
                let text = self.registry.arriving_with(id).map_or_else(
                    || format!("there is no migration `{id}` here"),
                    |vm| format!("migration {id} brings {vm} here: repeat this on the source host"),
                );
                Err(Denied::Coded(ErrorCode::NoSuchMigration, text))
            }
            Err(error) => Err(Denied::Local(format!("the report of {id}: {error}"))),
        }
    }
}
