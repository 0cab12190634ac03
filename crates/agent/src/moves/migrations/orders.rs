//! What can be done to a running migration: other bounds, cancelling, and the agent's stop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Bounds, BoundsChange, Progress};
use engine::Watch;

use super::Migrations;
use crate::denied::Denied;
use crate::moves::history::What;
use crate::moves::history::table::{Entry, is_committed, too_late};

/// How long a stopping agent waits for carried migrations that it has cancelled.
const CANCELLED_WAIT: Duration = Duration::from_secs(30);

impl Migrations {
    /// Cancels a migration before its point of no return: its VM stays here.
    pub(crate) fn cancel(&self, id: &str) -> Result<(), Denied> {
        let (watch, progress) = self.running(id)?;
        if self.table().has_committed(&progress) {
            return Err(too_late(&progress));
        }
        watch.cancel();
        Ok(())
    }

    /// Changes the bounds of a migration, and returns the new ones.
    pub(crate) fn set(&self, id: &str, change: BoundsChange) -> Result<Bounds, Denied> {
        if change.is_empty() {
            return Err(Denied::Invalid("there is nothing to change".to_owned()));
        }
        let (watch, progress) = self.running(id)?;
        // A carried migration in post-copy still sends memory.
        let is_carried = self.table().entries.get(id).is_some_and(|one| one.thread.is_none());
        if is_committed(&progress) && !is_carried {
            return Err(too_late(&progress));
        }
        Ok(watch.set(change))
    }

    /// Whether a VM that another program commands is on its way to host `to`.
    pub(crate) fn is_carrying_to(&self, to: &str) -> bool {
        self.carries(|progress| progress.to == to)
    }

    /// Whether this VM is.
    pub(crate) fn is_carrying(&self, vm: &str, to: &str) -> bool {
        self.carries(|progress| progress.vm == vm && progress.to == to)
    }

    fn carries(&self, is_it: impl Fn(&Progress) -> bool) -> bool {
        !self.carried(is_it).is_empty()
    }

    /// The watch of the migration of this VM that is carried. None if several may be meant: VMs
    /// without a name and a UUID are all called the same.
    pub(super) fn carried_watch(&self, vm: &str, to: &str) -> Option<Arc<Watch>> {
        let mut carried = self.carried(|progress| progress.vm == vm && progress.to == to);
        carried.pop().filter(|_| carried.is_empty())
    }

    fn carried(&self, is_it: impl Fn(&Progress) -> bool) -> Vec<Arc<Watch>> {
        let table = self.table();
        let carried = table.entries.values().filter(|entry| {
            let is_carried = entry.what == What::Migration && entry.thread.is_none();
            is_carried && entry.report.is_none() && is_it(&entry.progress())
        });
        carried.map(|entry| Arc::clone(&entry.watch)).collect()
    }

    /// Starts no more, cancels those that run, and waits for them. Those past their point of no
    /// return are not cancelled; carried ones, such as post-copies, have time until `until`.
    pub(crate) fn close(&self, until: Instant) {
        let mut threads = Vec::new();
        {
            let mut table = self.table();
            table.closing = true;
            for (id, entry) in &table.entries {
                if entry.report.is_some() {
                    continue;
                }
                if table.has_committed(&entry.progress()) {
                    tracing::warn!(id, "past its commit: the agent waits for it before it ends");
                } else {
                    tracing::info!(id, "cancelling: the agent is stopping");
                    entry.watch.cancel();
                }
            }
            threads.extend(table.entries.values_mut().filter_map(|entry| entry.thread.take()));
        }
        for thread in threads {
            // A panic in the thread was caught and logged there.
            let _ = thread.join();
        }
        self.wait_carried(until);
    }

    /// Waits for the ends of carried migrations, which run on threads of their listeners.
    fn wait_carried(&self, until: Instant) {
        let cancelled_until = Instant::now() + CANCELLED_WAIT;
        let mut table = self.table();
        loop {
            let running = table.entries.values().filter(|entry| entry.report.is_none());
            let running: Vec<Progress> = running.map(Entry::progress).collect();
            // One that was ordered to end may turn out to be past its commit only then.
            let until = if running.iter().any(is_committed) { until } else { cancelled_until };
            if running.is_empty() {
                return;
            }
            if Instant::now() < until {
                self.ended.wait_until(&mut table, until);
                continue;
            }
            for entry in table.entries.values().filter(|entry| entry.report.is_none()) {
                let one = entry.progress();
                let Progress { id, vm, to, .. } = &one;
                entry.watch.break_off();
                if is_committed(&one) {
                    tracing::error!(
                        id,
                        vm,
                        to,
                        "aborting past the commit: in post-copy the VM stops now, until its \
                         manager resumes the migration"
                    );
                } else {
                    tracing::warn!(id, vm, to, "cancelled, and has not ended yet");
                }
            }
            return;
        }
    }
}
