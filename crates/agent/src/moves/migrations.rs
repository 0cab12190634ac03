//! Migrations that leave this host: running ones, each on its own thread, and ended ones,
//! with their reports.

mod asked;
mod copy_room;
mod happenings;
mod orders;
mod routes;
mod upgrades;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use api::{Bounds, CpuFloor, ErrorCode, Happening, MigrateRequest, Outcome, Progress, Report};
use engine::{Buffers, Domain, HandOver, Local, Migrated, Peer, Settlement, SourceVm, Watch};
use parking_lot::{Condvar, MutexGuard};

use crate::denied::Denied;
use crate::events::Events;
use crate::id::{is_id, random_id};
use crate::metrics::Metrics;
use crate::moves::history::ended::fault;
use crate::moves::history::table::Table;
use crate::moves::history::{History, What};
use crate::moves::recovery::Settlers;
use crate::peers::Routes;
use crate::vms::registry::Registry;
use crate::vms::vm::Vm;
use happenings::{began, ended};

/// The function that moves a VM: the engine's, or a test's with chosen faults.
pub(crate) type Mover =
    dyn Fn(&Local, &Peer, SourceVm, &MigrateRequest, &Arc<Watch>) -> Migrated + Send + Sync;

/// Migrations that leave this host.
pub(crate) struct Migrations {
    registry: Arc<Registry>,
    settlers: Arc<Settlers>,
    events: Arc<Events>,
    local: Local,
    routes: Routes,
    mover: Box<Mover>,
    history: Arc<History>,
    metrics: Metrics,
    /// Notified when a migration has ended and its report is available.
    ended: Condvar,
}

impl Migrations {
    pub(crate) fn new(
        settlers: &Arc<Settlers>,
        local: Local,
        routes: Routes,
        mover: Box<Mover>,
    ) -> Self {
        let (registry, settlers) = (Arc::clone(&settlers.registry), Arc::clone(settlers));
        let (events, history) = (Arc::clone(&settlers.events), Arc::clone(&settlers.history));
        Self {
            registry,
            settlers,
            events,
            local,
            routes,
            mover,
            history,
            metrics: Metrics::default(),
            ended: Condvar::new(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.history.table.lock()
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
        let id = self.unused_id(&self.table())?;
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
        if !is_id(id) {
            return Err(Denied::Invalid("that is not a migration's id".to_owned()));
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
        self.unused_id(&self.table())
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
        let watch = match what {
            What::Migration => self.watch(progress, bounds),
            // They publish nothing.
            What::Disk => Arc::new(Watch::new(progress, bounds)),
            What::Connection => {
                Arc::new(Watch::new(progress, bounds).next_to(self.carried_watch(vm, to)))
            }
        };
        let mut table = self.table();
        // A VM in post-copy may open its connection for urgent pages late.
        if table.closing && !table.has_committed(&watch.progress().1) {
            watch.cancel();
        }
        table.add(id, what, Arc::clone(&watch), None);
        drop(table);
        if what == What::Migration {
            self.events.publish(began(&watch));
        }
        let carried = catch_unwind(AssertUnwindSafe(|| run(&watch)));
        let report =
            carried.unwrap_or_else(|_| fault(&watch, "a fault in the agent; see its log").report);
        match &report.outcome {
            Outcome::Done => tracing::info!(to, "carried"),
            Outcome::Failed(why) => tracing::warn!(to, why, "a carried migration has failed"),
            Outcome::Cancelled => tracing::info!(to, "cancelled"),
        }
        match what {
            What::Migration => self.keep(id, report),
            What::Disk | What::Connection => self.keep_quietly(id, report),
        }
    }

    /// Saves its report, and wakes all that wait for it.
    fn keep(&self, id: &str, report: Report) {
        self.metrics.count(&report);
        let happening = ended(&report);
        self.keep_quietly(id, report);
        self.events.publish(happening);
    }

    /// As `keep`, but without counting it as a migration or publishing its end.
    fn keep_quietly(&self, id: &str, report: Report) {
        self.history.keep(id, report);
        self.ended.notify_all();
    }

    fn begin(self: &Arc<Self>, id: &str, mut request: MigrateRequest) -> Result<(), Denied> {
        let (peer, its) = (self.peer(&request.to)?, id.to_owned());
        request.bounds.cpu_floor = self.cpu_floor(&request)?;
        self.begin_with(id, request, move |this, vm, request, watch| {
            this.perform(&its, &peer, vm, request, watch);
        })
    }

    /// Reserves the VM, and has `perform` move it on a thread of its own.
    fn begin_with(
        self: &Arc<Self>,
        id: &str,
        request: MigrateRequest,
        perform: impl FnOnce(&Self, &Arc<Vm>, &MigrateRequest, &Arc<Watch>) + Send + 'static,
    ) -> Result<(), Denied> {
        api::check_times(request.downtime_ms, request.blackout_max_s, request.timeout_s)
            .map_err(Denied::Invalid)?;
        request.slowing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
        request.sharing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
        if self.table().closing {
            return Err(Denied::Closing);
        }
        self.settlers.keeps_here(&request.vm)?;
        let vm = self.registry.begin_move(&request.vm, id)?;
        self.settlers.left(&request.vm);
        let progress =
            Progress::new((id, &request.vm), (&self.local.agent, &request.to), vm.ram_bytes());
        let watch = self.watch(progress, request.bounds.clone());

        let mut table = self.table();
        if table.closing {
            self.registry.stays(&request.vm);
            return Err(Denied::Closing);
        }
        let taken = request.vm.clone();
        let span = data_threads::migration_span(id, &taken);
        let spawned = thread::Builder::new().name(format!("move-{id}")).spawn({
            let (this, watch) = (Arc::clone(self), Arc::clone(&watch));
            move || span.in_scope(|| perform(&this, &vm, &request, &watch))
        });
        let thread = match spawned {
            Ok(thread) => thread,
            Err(error) => {
                self.registry.stays(&taken);
                return Err(Denied::Local(format!(
                    "cannot start a thread for the migration: {error}"
                )));
            }
        };
        table.add(id, What::Migration, watch, Some(thread));
        Ok(())
    }

    /// The CPU floor of a migration; none if its threads are not restricted to idle CPUs.
    fn cpu_floor(&self, request: &MigrateRequest) -> Result<Option<CpuFloor>, Denied> {
        let yields = |floor: &CpuFloor| *floor != CpuFloor::ALL;
        let requested = request.bounds.cpu_floor;
        if request.disks.is_none() {
            return Ok(self.floor_for(requested));
        }
        // A guest waits for its disks while it runs, and not only when it has stopped.
        requested.filter(yields).map_or(Ok(None), |floor| {
            Err(Denied::Invalid(format!(
                "a CPU floor of {floor} cannot be kept while disks move: the guest's writes may \
                 wait for the threads that copy them"
            )))
        })
    }

    /// The CPU floor of a migration without disks that requests this one.
    pub(crate) fn floor_for(&self, requested: Option<CpuFloor>) -> Option<CpuFloor> {
        let floor = requested.unwrap_or(self.local.cpu_floor);
        Some(floor).filter(|floor| *floor != CpuFloor::ALL)
    }

    fn unused_id(&self, table: &Table) -> Result<String, Denied> {
        for _ in 0..16 {
            let id = random_id()
                .map_err(|error| Denied::Local(format!("cannot make a random ID: {error}")))?;
            if !table.entries.contains_key(&id) && !self.history.reports.has(&id) {
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
            events.publish(Happening::MigrationPhase { migration, vm, phase });
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
        self.events.publish(began(watch));
        let ran = self.registry.is_running(&vm.name);
        let Migrated { report, settlement } =
            self.run(&self.local, peer, (vm, None), request, watch);
        match &report.outcome {
            _ if settlement.is_in_doubt() => {}
            Outcome::Done => self.registry.moved(&vm.name),
            outcome => {
                self.note_stop(id, vm, ran, outcome);
                self.registry.stays(&vm.name);
            }
        }
        self.settlers.leaving(settlement, vm);
        self.keep(id, report);
    }

    /// Moves a VM, until it is decided who has it or the connection is lost.
    fn run(
        &self,
        local: &Local,
        peer: &Peer,
        (vm, hand_over): (&Arc<Vm>, Option<Arc<dyn HandOver>>),
        request: &MigrateRequest,
        watch: &Arc<Watch>,
    ) -> Migrated {
        let Some(machine) = vm.machine() else { return fault(watch, "its QEMU has ended") };
        let cwd = machine.cwd.to_string_lossy().into_owned();
        let (name, share_domain) = (vm.name.clone(), Domain(vm.share_domain.clone()));
        let source = SourceVm { name, machine, cwd, share_domain, hand_over };
        let moved =
            catch_unwind(AssertUnwindSafe(|| (self.mover)(local, peer, source, request, watch)));
        moved.unwrap_or_else(|_| self.after_fault(vm, watch))
    }

    /// Notes why a VM that `ran` and did not move doesn't run any more.
    fn note_stop(&self, id: &str, vm: &Vm, ran: bool, outcome: &Outcome) {
        if let Outcome::Failed(why) = outcome
            && ran
            && !self.registry.is_running(&vm.name)
        {
            vm.stopped_by(format!("stopped since migration {id} failed: {why}"));
        }
    }

    /// Handles a panic in the engine.
    ///
    /// Only the journal, if there is one yet, says whose the VM is, so settling continues from it.
    fn after_fault(&self, vm: &Vm, watch: &Watch) -> Migrated {
        let kept = self.settlers.kept_leaving(&vm.name);
        let mut migrated = fault(watch, "a fault in the agent; see its log");
        if self.settlers.take_up_after_fault(&vm.name, kept) {
            migrated.report.in_doubt = true;
            migrated.settlement = Settlement::InDoubt(None);
        }
        migrated
    }
}

#[cfg(test)]
mod tests;
