//! The migrations that an agent knows: running ones, and the last ended ones.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use api::{ErrorCode, Phase, Progress, Report};
use engine::Watch;
use switchover::source::Outcome;

use super::ended::ended_progress;
use crate::denied::Denied;

/// Ended migrations that are listed; older ones are still found by their id.
pub(in crate::moves) const LISTED_MAX: usize = 100;

/// What is listed as a migration; all but VMs only where another program commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A VM.
    Migration,
    /// A VM's disk, which is copied before and while the VM moves.
    Disk,
    /// Another connection of a VM that moves: a multifd channel, or one for urgent pages.
    Connection,
}

#[derive(Default)]
pub(in crate::moves) struct Table {
    pub(in crate::moves) entries: BTreeMap<String, Entry>,
    /// Ended ones that were started by an earlier run of the agent, the latest first.
    pub(in crate::moves) earlier: Vec<Progress>,
    started: u64,
    pub(in crate::moves) closing: bool,
}

pub(in crate::moves) struct Entry {
    /// They count up in the order in which migrations began.
    pub(in crate::moves) number: u64,
    pub(in crate::moves) what: What,
    pub(in crate::moves) watch: Arc<Watch>,
    /// None for one that is carried, which runs on a thread of its listener.
    pub(in crate::moves) thread: Option<JoinHandle<()>>,
    pub(in crate::moves) report: Option<Arc<Report>>,
    /// How its switchover was settled, if that was before its report was kept.
    pub(in crate::moves) settled: Option<Outcome>,
}

impl Table {
    /// All running migrations, and the last ended ones; the latest first.
    pub(in crate::moves) fn list(&self) -> Vec<Progress> {
        let mut entries: Vec<&Entry> = self.entries.values().collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.number));
        let earlier = LISTED_MAX.saturating_sub(entries.len());
        let earlier = self.earlier.iter().take(earlier).cloned();
        entries.into_iter().map(Entry::progress).chain(earlier).collect()
    }

    pub(in crate::moves) fn add(
        &mut self,
        id: &str,
        what: What,
        watch: Arc<Watch>,
        thread: Option<JoinHandle<()>>,
    ) {
        self.started += 1;
        let (number, report, settled) = (self.started, None, None);
        let entry = Entry { number, what, watch, thread, report, settled };
        self.entries.insert(id.to_owned(), entry);
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        while self.entries.len() > LISTED_MAX {
            let ended = self.entries.iter().filter(|(_, entry)| entry.report.is_some());
            let Some((id, _)) = ended.min_by_key(|(_, entry)| entry.number) else { return };
            let id = id.clone();
            if let Some(thread) = self.entries.remove(&id).and_then(|entry| entry.thread) {
                // The thread has saved the report, and has nothing left to do.
                let _ = thread.join();
            }
        }
    }

    /// Whether a running migration is past its point of no return. A VM in post-copy may have
    /// several connections, which are listed one by one: none of them may be broken off.
    pub(in crate::moves) fn has_committed(&self, running: &Progress) -> bool {
        self.entries.values().any(|entry| {
            let other = entry.progress();
            let is_of_it = (&other.vm, &other.to) == (&running.vm, &running.to);
            is_of_it && is_committed(&other)
        })
    }
}

impl Entry {
    pub(in crate::moves) fn progress(&self) -> Progress {
        if let Some(report) = self.report.as_ref().filter(|one| one.settled_unix_s.is_some()) {
            return ended_progress(report);
        }
        let mut progress = self.watch.progress().1;
        // Without its report, a migration is not shown as ended.
        progress.outcome = self.report.as_ref().map(|report| report.outcome.clone());
        progress.in_doubt = self.report.as_ref().is_some_and(|report| report.in_doubt);
        progress
    }
}

/// Whether a migration is running past its point of no return.
pub(in crate::moves) fn is_committed(progress: &Progress) -> bool {
    progress.outcome.is_none() && progress.phase >= Phase::Committed
}

pub(in crate::moves) fn too_late(Progress { vm, to, .. }: &Progress) -> Denied {
    let text = format!("it is too late: {vm} already belongs to {to}");
    Denied::Coded(ErrorCode::MigrationCommitted, text)
}

pub(in crate::moves) fn has_ended(id: &str) -> Denied {
    Denied::Coded(ErrorCode::MigrationEnded, format!("migration {id} has ended"))
}
