//! Migrations that leave this host: running ones, each on its own thread, and ended ones,
//! with their reports.

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
/// How long to wait for the report of a migration that has ended.
const REPORT_WAIT: Duration = Duration::from_secs(30);
/// How long a stopping agent waits for carried migrations that it has cancelled.
const CANCELLED_WAIT: Duration = Duration::from_secs(30);

/// The function that moves a VM: the engine's, or a test's with chosen faults.
pub(crate) type Mover =
    dyn Fn(&Local, &Peer, SourceVm, &MigrateRequest, &Arc<Watch>) -> Migrated + Send + Sync;

/// The hosts that VMs can move to.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    pub(crate) peers: Peers,
    pub(crate) insecure_plaintext: bool,
}

/// What is carried for another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A VM.
    Migration,
    /// A VM's disk, which is copied before and while the VM moves.
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
    /// Notified when a migration has ended and its report is available.
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

    /// The sums over ended migrations.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The buffers for outgoing and for incoming migrations.
    pub(crate) fn buffers(&self) -> [Buffers; 2] {
        self.local.resources.buffers()
    }

    /// The hosts that VMs can move to.
    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Starts a migration, which continues on its own thread.
    pub(crate) fn start(self: &Arc<Self>, request: MigrateRequest) -> Result<String, Denied> {
        let id = self.unused_id(&self.table.lock())?;
        self.begin(&id, request)?;
        Ok(id)
    }

    /// Starts a migration with an id that a coordinator chose.
    ///
    /// A repeated call with the same id and request changes nothing.
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

    /// An id for a migration that is carried for another program.
    pub(crate) fn new_id(&self) -> Result<String, Denied> {
        self.unused_id(&self.table.lock())
    }

    /// Lists a migration that another program commands, of a VM that this agent does not own,
    /// while `run` carries it, and keeps its report.
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

    /// Saves its report, and wakes all that wait for it.
    fn keep(&self, id: &str, report: Report) {
        self.metrics.count(&report);
        let happening = ended(&report);
        self.keep_quietly(id, report);
        self.events.tell(happening);
    }

    /// As `keep`, but without counting it as a migration or publishing its end.
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
        api::check_times(request.downtime_ms, request.blackout_max_s, request.timeout_s)
            .map_err(Denied::Asked)?;
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

    /// A host that VMs can move to.
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
        // Outgoing migrations need the same protection as incoming ones.
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

    /// The watch that shows its progress and publishes its phases.
    fn watch(&self, progress: Progress, bounds: Bounds) -> Arc<Watch> {
        let events = Arc::clone(&self.events);
        let (migration, vm) = (progress.id.clone(), progress.vm.clone());
        Arc::new(Watch::new(progress, bounds).with_entered(move |phase| {
            let (migration, vm) = (migration.clone(), vm.clone());
            events.tell(Happening::MigrationPhase { migration, vm, phase });
        }))
    }

    /// Runs the migration, and then removes the VM here or frees it.
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

    /// Handles a panic in the engine.
    ///
    /// Only the journal, if there is one yet, says whose the VM is, so settling continues from it.
    fn after_fault(&self, vm: &Vm, watch: &Watch) -> Migrated {
        let kept = self.settlers.kept_leaving(&vm.name);
        let decided = !self.settlers.take_up_after_fault(&vm.name, kept);
        Migrated { decided, ..fault(watch, "a fault in the agent; its log says more") }
    }

    /// All running migrations, and the last ended ones; the latest first.
    pub(crate) fn list(&self) -> Vec<Progress> {
        let table = self.table.lock();
        let mut entries: Vec<&Entry> = table.entries.values().collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.number));
        entries.into_iter().map(Entry::progress).collect()
    }

    /// The progress of a migration, or how it ended.
    pub(crate) fn show(&self, id: &str) -> Result<Progress, Denied> {
        if let Some(entry) = self.table.lock().entries.get(id) {
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
        let watch = match self.table.lock().entries.get(id) {
            Some(entry) if entry.report.is_none() => Arc::clone(&entry.watch),
            Some(entry) => return Ok((version, entry.progress())),
            None => return Ok((version, ended_progress(&*self.saved(id)?))),
        };
        let (version, progress) = watch.wait(version, timeout);
        if progress.outcome.is_none() {
            // A panic ends a migration without an outcome.
            let ended = self.table.lock().entries.get(id).is_some_and(|e| e.report.is_some());
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

    /// Cancels a migration before its point of no return: its VM stays here.
    pub(crate) fn cancel(&self, id: &str) -> Result<(), Denied> {
        let (watch, progress) = self.running(id)?;
        if self.table.lock().has_committed(&progress) {
            return Err(too_late(&progress));
        }
        watch.cancel();
        Ok(())
    }

    /// Changes the bounds of a migration, and returns the new ones.
    pub(crate) fn set(&self, id: &str, change: BoundsChange) -> Result<Bounds, Denied> {
        if change.is_empty() {
            return Err(Denied::Asked("there is nothing to change".to_owned()));
        }
        let (watch, progress) = self.running(id)?;
        // A carried migration in post-copy still sends memory.
        let is_carried = self.table.lock().entries.get(id).is_some_and(|one| one.thread.is_none());
        if is_committed(&progress) && !is_carried {
            return Err(too_late(&progress));
        }
        Ok(watch.set(change))
    }

    /// A migration that has not ended.
    fn running(&self, id: &str) -> Result<(Arc<Watch>, Progress), Denied> {
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
        Ok((Arc::clone(&entry.watch), progress))
    }

    /// Whether a VM that belongs to host `to` already is still moving there.
    pub(crate) fn has_committed_to(&self, to: &str) -> bool {
        let table = self.table.lock();
        table.entries.values().map(Entry::progress).any(|one| one.to == to && is_committed(&one))
    }

    /// Starts no more, cancels those that run, and waits for them. Those past their point of no
    /// return are not cancelled; carried ones, such as post-copies, have time until `until`.
    pub(crate) fn close(&self, until: Instant) {
        let mut threads = Vec::new();
        {
            let mut table = self.table.lock();
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

    /// Waits for the ends of carried migrations, which run on threads of their doors.
    fn wait_carried(&self, until: Instant) {
        let cancelled_until = Instant::now() + CANCELLED_WAIT;
        let mut table = self.table.lock();
        loop {
            let running = table.entries.values().filter(|entry| entry.report.is_none());
            let running: Vec<Progress> = running.map(Entry::progress).collect();
            let until = if running.iter().any(is_committed) { until } else { cancelled_until };
            if running.is_empty() {
                return;
            }
            if !self.ended.wait_until(&mut table, until).timed_out() {
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
                        "broken off past its commit: in post-copy the VM stops now, until \
                         its manager resumes the migration"
                    );
                } else {
                    tracing::warn!(id, vm, to, "cancelled, and still not over");
                }
            }
            return;
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

impl Table {
    /// Whether a running migration is past its point of no return. A VM in post-copy may have
    /// several connections, which are listed one by one: none of them may be broken off.
    fn has_committed(&self, running: &Progress) -> bool {
        self.entries.values().any(|entry| {
            let other = entry.progress();
            let is_of_it = (&other.vm, &other.to) == (&running.vm, &running.to);
            is_of_it && is_committed(&other)
        })
    }
}

impl Entry {
    fn progress(&self) -> Progress {
        let mut progress = self.watch.progress().1;
        // Without its report, a migration is not shown as ended.
        progress.outcome = self.report.as_ref().map(|report| report.outcome.clone());
        progress
    }
}

/// Whether a migration is running past its point of no return.
fn is_committed(progress: &Progress) -> bool {
    progress.outcome.is_none() && progress.phase >= Phase::Committed
}

fn too_late(Progress { vm, to, .. }: &Progress) -> Denied {
    let text = format!("it is too late: {vm} already belongs to {to}");
    Denied::Coded(ErrorCode::MigrationCommitted, text)
}

fn has_ended(id: &str) -> Denied {
    Denied::Coded(ErrorCode::MigrationEnded, format!("migration {id} has ended"))
}

/// Whether all addresses of the peer are on loopback, which no other host can reach.
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
            // The thread has saved the report, and has nothing left to do.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
