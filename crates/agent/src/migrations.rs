//! Migrations that leave this host: those that run, each on a thread of its
//! own, and those that ended, with their reports.

mod ended;
mod happenings;
mod reports;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use api::{
    Bounds, BoundsChange, ErrorCode, Happening, MigrateRequest, Outcome, Phase, Progress, Report,
};
use engine::{Buffers, Domain, Local, Migrated, Peer, SourceVm, Watch};
use parking_lot::{Condvar, Mutex};

use crate::config::PeerEntry;
use crate::denied::Denied;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::recovery::Settlers;
use crate::registry::Registry;
use crate::vm::Vm;
use ended::{ended_progress, fault};
use happenings::{began, ended};
use reports::Reports;
pub(crate) use reports::random_id;

/// Ended migrations that are listed; older ones are still found by their id.
const LISTED_MAX: usize = 100;
/// From a migration's last word to its report.
const REPORT_WAIT: Duration = Duration::from_secs(30);

/// What moves a VM: the engine, or a stand-in whose faults a test chooses.
pub(crate) type Mover =
    dyn Fn(&Local, &Peer, SourceVm, &MigrateRequest, &Arc<Watch>) -> Migrated + Send + Sync;

/// Where VMs can go from here.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    pub(crate) peers: Peers,
    pub(crate) insecure_plaintext: bool,
}

/// What is carried for somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A VM.
    Migration,
    /// A disk of one, which is copied before and while it moves.
    Disk,
}

/// Migrations that leave this host.
pub(crate) struct Migrations {
    registry: Arc<Registry>,
    settlers: Arc<Settlers>,
    events: Arc<Events>,
    local: Local,
    routes: Routes,
    mover: Box<Mover>,
    reports: Reports,
    metrics: Metrics,
    table: Mutex<Table>,
    /// Told when a migration has ended and its report is there.
    ended: Condvar,
}

#[derive(Default)]
struct Table {
    entries: BTreeMap<String, Entry>,
    begun: u64,
    closing: bool,
}

struct Entry {
    number: u64,
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
    report: Option<Arc<Report>>,
}

impl Migrations {
    pub(crate) fn new(
        settlers: &Arc<Settlers>,
        local: Local,
        routes: Routes,
        mover: Box<Mover>,
    ) -> Self {
        let (registry, settlers) = (Arc::clone(&settlers.registry), Arc::clone(settlers));
        let events = Arc::clone(&settlers.events);
        let reports = Reports::new(registry.state().reports());
        Self {
            registry,
            settlers,
            events,
            local,
            routes,
            mover,
            reports,
            metrics: Metrics::default(),
            table: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// What those that ended add up to.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// For what leaves, and for what comes.
    pub(crate) fn buffers(&self) -> [Buffers; 2] {
        self.local.resources.buffers()
    }

    /// Where VMs can go from here.
    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Starts one; it goes on by itself.
    pub(crate) fn start(self: &Arc<Self>, request: MigrateRequest) -> Result<String, Denied> {
        let id = self.unused_id(&self.table.lock())?;
        self.begin(&id, request)?;
        Ok(id)
    }

    /// Starts one that was given its id by somebody else. Told so again, it is
    /// the same one.
    pub(crate) fn start_as(
        self: &Arc<Self>,
        id: &str,
        request: MigrateRequest,
    ) -> Result<(), Denied> {
        if !Reports::is_id(id) {
            return Err(Denied::Asked("that is not a migration's id".to_owned()));
        }
        match self.show(id) {
            Ok(known) if known.vm == request.vm && known.to == request.to => Ok(()),
            Ok(known) => Err(Denied::Conflict(format!("migration {id} moves {}", known.vm))),
            Err(denied) if denied.code() == ErrorCode::NoSuchMigration => self.begin(id, request),
            Err(denied) => Err(denied),
        }
    }

    /// An id for one that somebody else commands.
    pub(crate) fn new_id(&self) -> Result<String, Denied> {
        self.unused_id(&self.table.lock())
    }

    /// Shows one that somebody else commands, of a VM that is none of this agent's, while
    /// `run` carries it, and keeps its report.
    pub(crate) fn carry(
        &self,
        (id, vm, to): (&str, &str, &str),
        bounds: Bounds,
        what: What,
        run: impl FnOnce(&Arc<Watch>) -> Report,
    ) {
        let progress = Progress::new((id, vm), (&self.local.agent, to), 0);
        let watch = self.watch(progress, bounds);
        let mut table = self.table.lock();
        if table.closing {
            watch.cancel();
        }
        table.begun += 1;
        let (number, watched) = (table.begun, Arc::clone(&watch));
        table
            .entries
            .insert(id.to_owned(), Entry { number, watch: watched, thread: None, report: None });
        forget_oldest(&mut table);
        drop(table);
        if what == What::Migration {
            self.events.tell(began(&watch));
        }
        let carried = catch_unwind(AssertUnwindSafe(|| run(&watch)));
        let report = carried
            .unwrap_or_else(|_| fault(&watch, "a fault in the agent; its log says more").report);
        match &report.outcome {
            Outcome::Done => tracing::info!(to, "carried"),
            Outcome::Failed(why) => tracing::warn!(to, why, "not carried to its end"),
            Outcome::Cancelled => tracing::info!(to, "cancelled"),
        }
        match what {
            What::Migration => self.keep(id, report),
            What::Disk => self.keep_quietly(id, report),
        }
    }

    /// Saves its report, for all who wait for it.
    fn keep(&self, id: &str, report: Report) {
        self.metrics.count(&report);
        let happening = ended(&report);
        self.keep_quietly(id, report);
        self.events.tell(happening);
    }

    /// The same of what is no migration by itself: it is not counted as one.
    fn keep_quietly(&self, id: &str, report: Report) {
        if let Err(error) = self.reports.save(&report) {
            tracing::warn!(id, %error, "the migration's report can't be saved");
        }
        let mut table = self.table.lock();
        if let Some(entry) = table.entries.get_mut(id) {
            entry.report = Some(Arc::new(report));
        }
        drop(table);
        self.ended.notify_all();
    }

    fn begin(self: &Arc<Self>, id: &str, request: MigrateRequest) -> Result<(), Denied> {
        let peer = self.peer(&request.to)?;
        api::check_blackout(request.downtime_ms, request.blackout_max_s).map_err(Denied::Asked)?;
        request.slowing.check().map_err(|error| Denied::Asked(error.to_string()))?;
        request.sharing.check().map_err(|error| Denied::Asked(error.to_string()))?;
        if self.table.lock().closing {
            return Err(Denied::Closing);
        }
        self.settlers.keeps_here(&request.vm)?;
        let vm = self.registry.begin_move(&request.vm, id)?;
        self.settlers.left(&request.vm);
        let progress =
            Progress::new((id, &request.vm), (&self.local.agent, &request.to), vm.ram_bytes());
        let watch = self.watch(progress, request.bounds.clone());

        let mut table = self.table.lock();
        if table.closing {
            self.registry.stays(&request.vm);
            return Err(Denied::Closing);
        }
        let taken = request.vm.clone();
        let span = data_threads::migration_span(id, &taken);
        let spawned = thread::Builder::new().name(format!("move-{id}")).spawn({
            let (this, watch, id) = (Arc::clone(self), Arc::clone(&watch), id.to_owned());
            move || span.in_scope(|| this.perform(&id, &peer, &vm, &request, &watch))
        });
        let thread = match spawned {
            Ok(thread) => thread,
            Err(error) => {
                self.registry.stays(&taken);
                return Err(Denied::Local(format!("no thread for the migration: {error}")));
            }
        };
        table.begun += 1;
        let entry = Entry { number: table.begun, watch, thread: Some(thread), report: None };
        table.entries.insert(id.to_owned(), entry);
        forget_oldest(&mut table);
        Ok(())
    }

    /// A host that VMs can go to from here.
    pub(crate) fn peer(&self, name: &str) -> Result<Peer, Denied> {
        if name == self.local.agent {
            let text = format!("{name} is this host: the VM is there already");
            return Err(Denied::Coded(ErrorCode::AlreadyThere, text));
        }
        let Some(peer) = self.routes.peers.named(name) else {
            let peers = self.routes.peers.now();
            let known: Vec<&str> = peers.iter().map(|peer| peer.name.as_str()).collect();
            let text = if known.is_empty() {
                format!("there is no host `{name}`: this agent has no peers, give it --peers FILE")
            } else {
                format!(
                    "there is no host `{name}` in the peers file; there is: {}",
                    known.join(", ")
                )
            };
            return Err(Denied::Coded(ErrorCode::NoSuchHost, text));
        };
        // Going out is as open as coming in.
        let may_leave = self.local.security.is_secure() || self.routes.insecure_plaintext;
        if !may_leave && !is_private(&peer) {
            let text = format!(
                "the memory of the VM would cross the network to {name} unencrypted: give this \
                 host a certificate (`droveway ca issue {}`, --tls), or, on a network of your \
                 own, start the agent with --insecure-plaintext",
                self.local.agent
            );
            return Err(Denied::Coded(ErrorCode::NotEncrypted, text));
        }
        Ok(Peer { name: peer.name, address: peer.address, nics: peer.nics })
    }

    fn unused_id(&self, table: &Table) -> Result<String, Denied> {
        for _ in 0..16 {
            let id = reports::random_id()
                .map_err(|error| Denied::Local(format!("no random id: {error}")))?;
            if !table.entries.contains_key(&id) && !self.reports.has(&id) {
                return Ok(id);
            }
        }
        Err(Denied::Local("no id is free: remove old reports".to_owned()))
    }

    /// What shows it, and tells of its phases.
    fn watch(&self, progress: Progress, bounds: Bounds) -> Arc<Watch> {
        let events = Arc::clone(&self.events);
        let (migration, vm) = (progress.id.clone(), progress.vm.clone());
        Arc::new(Watch::new(progress, bounds).with_entered(move |phase| {
            let (migration, vm) = (migration.clone(), vm.clone());
            events.tell(Happening::MigrationPhase { migration, vm, phase });
        }))
    }

    /// The whole migration, and what it means for the VM's place here.
    fn perform(
        &self,
        id: &str,
        peer: &Peer,
        vm: &Arc<Vm>,
        request: &MigrateRequest,
        watch: &Arc<Watch>,
    ) {
        self.events.tell(began(watch));
        let ran = self.registry.is_running(&vm.name);
        let migrated = match vm.machine() {
            Some(machine) => {
                let cwd = machine.cwd.to_string_lossy().into_owned();
                let (name, share_domain) = (vm.name.clone(), Domain(vm.share_domain.clone()));
                let source = SourceVm { name, machine, cwd, share_domain };
                let moved = catch_unwind(AssertUnwindSafe(|| {
                    (self.mover)(&self.local, peer, source, request, watch)
                }));
                moved.unwrap_or_else(|_| self.after_fault(vm, watch))
            }
            None => fault(watch, "its QEMU has ended"),
        };
        let Migrated { report, unsettled, decided } = migrated;
        match (&report.outcome, &unsettled) {
            _ if !decided => {}
            (Outcome::Done, _) => self.registry.moved(&vm.name),
            (outcome, _) => {
                if let Outcome::Failed(why) = outcome
                    && ran
                    && !self.registry.is_running(&vm.name)
                {
                    vm.stopped_by(format!("stopped since migration {id} failed: {why}"));
                }
                self.registry.stays(&vm.name);
            }
        }
        if let Some(driver) = unsettled {
            self.settlers.leaving(driver, vm, decided);
        }
        self.keep(id, report);
    }

    /// The engine's thread is gone, and whose the VM is says only its journal, if
    /// it had come to that: whoever settles it goes on from there.
    fn after_fault(&self, vm: &Vm, watch: &Watch) -> Migrated {
        let kept = self.settlers.kept_leaving(&vm.name);
        let decided = !self.settlers.take_up_after_fault(&vm.name, kept);
        Migrated { decided, ..fault(watch, "a fault in the agent; its log says more") }
    }

    /// All that run, and the last that ended; the latest first.
    pub(crate) fn list(&self) -> Vec<Progress> {
        let table = self.table.lock();
        let mut entries: Vec<&Entry> = table.entries.values().collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.number));
        entries.into_iter().map(Entry::progress).collect()
    }

    /// Where a migration is, or how it ended.
    pub(crate) fn show(&self, id: &str) -> Result<Progress, Denied> {
        if let Some(entry) = self.table.lock().entries.get(id) {
            return Ok(entry.progress());
        }
        Ok(ended_progress(&*self.saved(id)?))
    }

    /// Blocks until there is something newer than `version` (at most
    /// `timeout`). The last state, which has an outcome, comes only once the
    /// VM's place is settled and the report is there.
    pub(crate) fn wait(
        &self,
        id: &str,
        version: u64,
        timeout: Duration,
    ) -> Result<(u64, Progress), Denied> {
        let watch = match self.table.lock().entries.get(id) {
            Some(entry) if entry.report.is_none() => Arc::clone(&entry.watch),
            Some(entry) => return Ok((version, entry.progress())),
            None => return Ok((version, ended_progress(&*self.saved(id)?))),
        };
        let (version, progress) = watch.wait(version, timeout);
        if progress.outcome.is_none() {
            // A fault ends a migration without a word of its own.
            let ended = self.table.lock().entries.get(id).is_some_and(|e| e.report.is_some());
            return if ended { Ok((version, self.show(id)?)) } else { Ok((version, progress)) };
        }
        // Waits until it is there.
        self.report(id)?;
        Ok((version, self.show(id)?))
    }

    /// Blocks until it is in another phase than `seen`, or has ended (at most
    /// `timeout`).
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

    /// How a migration went. Waits for one that is just ending.
    pub(crate) fn report(&self, id: &str) -> Result<Arc<Report>, Denied> {
        let mut table = self.table.lock();
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

    /// Has a migration end with its VM here.
    pub(crate) fn cancel(&self, id: &str) -> Result<(), Denied> {
        self.running(id)?.cancel();
        Ok(())
    }

    /// Changes what a migration may use. Says what it may use from now on.
    pub(crate) fn set(&self, id: &str, change: BoundsChange) -> Result<Bounds, Denied> {
        if change.is_empty() {
            return Err(Denied::Asked("there is nothing to change".to_owned()));
        }
        Ok(self.running(id)?.set(change))
    }

    /// One that is before its point of no return.
    fn running(&self, id: &str) -> Result<Arc<Watch>, Denied> {
        let table = self.table.lock();
        let Some(entry) = table.entries.get(id) else {
            drop(table);
            self.saved(id)?;
            return Err(has_ended(id));
        };
        let progress = entry.progress();
        if progress.outcome.is_some() {
            return Err(has_ended(id));
        }
        if progress.phase >= Phase::Committed {
            let Progress { vm, to, .. } = progress;
            let text = format!("it is too late: {vm} already belongs to {to}");
            return Err(Denied::Coded(ErrorCode::MigrationCommitted, text));
        }
        Ok(Arc::clone(&entry.watch))
    }

    /// Starts no more, cancels those that run, and waits for them.
    pub(crate) fn close(&self) {
        let mut threads = Vec::new();
        {
            let mut table = self.table.lock();
            table.closing = true;
            for (id, entry) in &mut table.entries {
                if entry.report.is_none() {
                    tracing::info!(id, "cancelling: the agent is stopping");
                    entry.watch.cancel();
                }
                threads.extend(entry.thread.take());
            }
        }
        for thread in threads {
            // A panic in it was caught and reported there.
            let _ = thread.join();
        }
    }

    fn saved(&self, id: &str) -> Result<Arc<Report>, Denied> {
        match self.reports.read(id) {
            Ok(Some(report)) => Ok(Arc::new(report)),
            Ok(None) => {
                let text = format!("there is no migration `{id}` here");
                Err(Denied::Coded(ErrorCode::NoSuchMigration, text))
            }
            Err(error) => Err(Denied::Local(format!("the report of {id}: {error}"))),
        }
    }
}

impl Entry {
    fn progress(&self) -> Progress {
        let mut progress = self.watch.progress().1;
        // Until the report is there it has not ended for anybody.
        progress.outcome = self.report.as_ref().map(|report| report.outcome.clone());
        progress
    }
}

fn has_ended(id: &str) -> Denied {
    Denied::Coded(ErrorCode::MigrationEnded, format!("migration {id} has ended"))
}

/// The address of a network that nobody else is on.
fn is_private(peer: &PeerEntry) -> bool {
    let addresses = std::iter::once(peer.address).map(|address: SocketAddr| address.ip());
    addresses.chain(peer.nics.iter().copied()).all(|address| address.is_loopback())
}

fn forget_oldest(table: &mut Table) {
    while table.entries.len() > LISTED_MAX {
        let ended = table.entries.iter().filter(|(_, entry)| entry.report.is_some());
        let Some((id, _)) = ended.min_by_key(|(_, entry)| entry.number) else { return };
        let id = id.clone();
        if let Some(thread) = table.entries.remove(&id).and_then(|entry| entry.thread) {
            // It has written its report, and has nothing left to do.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
